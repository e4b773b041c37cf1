// What a maintainer needs, as Markdown: all failing runs and steps, whatever is open.

const LISTED = 12; // tensors of a run that are named

function issueText() {
  const failed = [...page.views.keys()].filter((number) => page.views[number].first);
  const said = isHeaded() ? failed.map(headlineOf) : [capital(page.lead)];
  const lines = [`# ${issueTitle(failed)}`, "", `**${page.verdict}**: ${page.title}`, "", ...said, "", ...(page.command ? ["```", page.command, "```", ""] : []), ...issueVerdicts()];
  failed.forEach((number) => {
    const [step, name, what] = page.views[number].first;
    const numbers = issueNumbers(number, numberOf.get(name), step);
    const [where, ranks] = ["- where: ", "- ranks: "].map((begin) => numbers.some((one) => one.startsWith(begin)));
    lines.push(`### First wrong ${name.includes("/") ? "tensor" : "value"}: ${labelOf(number)}`, "", `\`${name}\` in step ${step}: ${what}`, "", ...numbers, ...issueCauses(page.views[number]));
    const kinds = page.kind === "recording" ? kindsOf(tableOf(number, step), numberOf.get(name)).map(([title, kinds]) => [title.toLowerCase(), [kinds]]) : [];
    const { excluded } = page.views[number];
    const again = stepsAfter(number, step, numberOf.get(name));
    for (const [title, of] of [["again", again ? [again] : []], ["observed", newlyObserved(page.views[number], where, ranks)], ["ruled out", excluded.length ? [excluded.join("; ")] : []], ...kinds]) {
      lines.push(...of.map((one) => `- ${title}: ${one}`));
    }
    lines.push("");
  });
  if (!failed.length && page.verdict === "FAIL") lines.push(`### No tensor ${page.views.length ? "is too far" : "was judged"}`, "", ...issueCauses(page), "");
  const wrong = failed.flatMap(issueLines);
  if (wrong.length) lines.push("### Also wrong in this step", "", "Of modules from the inputs that they had, of what an optimizer made of the run's own gradients, and copies that differ between ranks:", "", "| run | tensor | what is wrong |", "|---|---|---|", ...wrong, "");
  const notes = untilWrong(failed).filter((one, place, all) => isNew(one, failed) && all.indexOf(one) === place);
  if (notes.length) lines.push("### Notes", "", ...notes.map((one) => `- ${one}`), "");
  lines.push("### How this was found out", "", "Lockstep held each tensor of the run against a float64 reference, which one process computed from the same weights and batches. The page report.html, which belongs to this, has the map, the pictures and all numbers.", "");
  lines.push(...page.found_out.filter(([, value]) => value !== page.command).map(([name, value]) => `- ${name}: ${value}`), "");
  return lines.join("\n");
}

/** Whether the first wrong tensor is the headline. */
function isHeaded() {
  return document.getElementById("headline") !== null;
}

/** The causes of a view, or of the page of a recording. */
function issueCauses(view) {
  const causes = view.causes.length || page.kind === "verification" ? view.causes : page.causes;
  return causes.length ? causes.map(([cause, evidence]) => `- cause: ${[cause, evidence].filter(Boolean).join(": ")}`) : ["- cause: not explained"];
}

/** The notes, of a recording without those of the steps after the first that is wrong. */
function untilWrong([number]) {
  const step = page.kind === "verification" ? null : (page.views[number]?.first[0] ?? Number(page.lead.match(/^step (\d+): /)?.[1]));
  let at = 0;
  return page.sentences.filter((one) => {
    at = Number(one.match(/^step (\d+): /)?.[1] ?? (one.startsWith("whole run: ") ? 0 : at));
    return !(at > step);
  });
}

/** Whether an issue has not said a sentence yet: what is wrong with the first wrong tensor, and its causes. */
function isNew(sentence, failed) {
  const told = [page.lead.replace(/^step \d+: /, ""), ...page.causes.map(([cause]) => cause), ...failed.map((number) => pathOf(page.views[number].first[1]))];
  return !/ are near enough; the farthest, /.test(sentence) && !told.some((one) => one && sentence.includes(one));
}

function issueVerdicts() {
  const lines = page.views.flatMap((view, number) => Object.entries(view.counts).map(([way, { far, judged, worst }], place) => {
    const farthest = worst ? `${far && worst[1].startsWith("batch/") ? "not equal" : `${shareText(worst[2] ?? Infinity)} times${worst[3] ? " of a factor" : ""}`}: \`${worst[1]}\`, step ${worst[0]}` : "";
    const copies = way === FROM_BATCH && view.differing.length ? `; copies of ${view.differing.length} differ between ranks` : "";
    const further = copies + (place === Object.keys(view.counts).length - 1 && view.further ? `; ${view.further}` : "");
    const what = page.kind === "recording" && way === FROM_BATCH ? "tensors and losses" : "tensors";
    return `| ${page.kind === "recording" ? "the run" : `${labelOf(number)}: ${view.verdict}`} | ${way} | ${far} of ${judged} ${what}${further} | ${farthest} |`;
  }));
  return lines.length ? ["| run | computed | too far | largest error / tolerated |", "|---|---|---|---|", ...lines, ""] : [];
}

/** What is wrong, before how much, and its cause. */
function issueTitle([number]) {
  if (page.verdict === "PASS") return `Lockstep: PASS: ${page.title}`;
  const said = isHeaded() ? headline(number)[0] : page.lead.replace(/ \([^()]*\)/g, "").split("; ")[0];
  const [cause] = [...(page.views[number]?.causes ?? []), ...page.causes].map(([name]) => name.split(/[;:] /)[0]);
  return `${capital(said.replace(/\.$/, ""))}${cause && !said.includes(cause) ? `: ${cause}` : ""} (${page.title.split(", ")[0]})`;
}

/** The tensors of a run that are wrong by themselves in its first wrong step, without the first. */
function issueLines(view) {
  const run = page.kind === "recording" ? "the run" : labelOf(view);
  const [step, first] = page.views[view].first;
  const wrong = wrongByThemselves(view, step).filter(([name]) => name !== first);
  const lines = wrong.slice(0, LISTED).map(([name, what]) => `| ${run} | \`${name}\` | ${[what, copiesText({ view, step }, name)].filter(Boolean).join("; ")} |`);
  return [...lines, ...(wrong.length > LISTED ? [`| ${run} | and ${wrong.length - LISTED} more | |`] : [])];
}

function errorText(row) {
  return `${sci(row.error)} of ${sci(row.tolerated, 1)} (2-norm), ${sci(row.largest)} of ${sci(row.toleratedLargest, 1)} (largest element)`;
}

function issueNumbers(view, number, step) {
  const row = wrongRowOf(view, step, number);
  if (row === null) return [];
  const ranks = ranksText(view, step, number, row);
  const lines = [...(ranks ? [`- ranks: ${ranks}`] : []), ...(row.where && !row.borrowed ? [`- worst in: ${row.where}`] : [])];
  if (row.picture) {
    if (row.far) lines.push(`- where: ${placeText(view, number, row)}`);
    lines.push("", "| index | run | reference |", "|---|---|---|");
    lines.push(...row.picture.elements.slice(0, 4).map(([index, own, reference]) => `| [${index.join(", ")}] | ${digits(own)} | ${digits(reference)} |`), "");
  }
  return lines;
}

function openIssue() {
  const text = el("textarea", { readonly: true, "aria-label": "The issue as Markdown" });
  text.value = issueText();
  const said = el("span", { role: "status", class: "quiet" });
  const copy = async () => {
    text.setSelectionRange(0, text.value.length, "backward"); // from its end, so that its beginning is in view
    try {
      await navigator.clipboard.writeText(text.value);
      said.textContent = " copied";
    } catch {
      said.textContent = " selected: copy it with Ctrl+C";
    }
  };
  const dialog = el("dialog", { "aria-labelledby": "issue-title", onclose: () => dialog.remove() },
    el("h2", { id: "issue-title" }, "What a maintainer needs"), text,
    el("p", { class: "tools" }, el("button", { type: "button", onclick: copy }, "Copy"), el("button", { type: "button", onclick: () => dialog.close() }, "Close"), said));
  document.body.append(dialog);
  dialog.showModal();
  copy();
  text.scrollTop = 0;
}
