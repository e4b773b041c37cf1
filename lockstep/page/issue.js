// What a maintainer needs, as Markdown: all failing runs and steps, whatever is open.

const LISTED = 12; // tensors of a run that are named

function issueText() {
  const lines = [`# ${issueTitle()}`, "", "Attach report.html: it has the map, the pictures and all numbers.", "", `**${page.verdict}**: ${page.title}`, "", ...(page.command ? ["```", page.command, "```"] : []), "", page.lead, "", ...issueVerdicts()];
  page.views.forEach((view, number) => {
    if (!view.first) return;
    const [step, name, what] = view.first;
    lines.push(`### First wrong tensor: ${labelOf(number)}`, "", `\`${name}\` in step ${step}: ${what}`, "", ...issueNumbers(number, numberOf.get(name), step));
    if (page.kind === "recording") lines.push(`- step ${step}: ${rightText(tableOf(number, step))}`);
    else lines.push(...(view.causes.length ? view.causes.map(([cause, evidence]) => `- cause: ${cause}: ${evidence}`) : ["- cause: not explained"]));
    for (const [title, said] of [["observed", view.observed], ["ruled out", view.excluded]]) {
      lines.push(...said.map((one) => `- ${title}: ${one}`));
    }
    lines.push("");
  });
  const failed = [...page.views.keys()].filter((number) => page.views[number].first);
  const wrong = failed.flatMap(issueLines);
  if (wrong.length) lines.push("### Wrong by itself", "", "| run | step | tensor | what is wrong |", "|---|---|---|---|", ...wrong, "");
  if (page.sentences.length) lines.push("### Notes", "", ...page.sentences.map((one) => `- ${one}`), "");
  lines.push("### How this was found out", "", "Each tensor of the run against a float64 reference by one process from the same weights and batches (Lockstep).", "");
  lines.push(...page.found_out.map(([name, value]) => `- ${name}: ${value}`), "");
  return lines.join("\n");
}

function issueVerdicts() {
  const lines = page.views.flatMap((view, number) => Object.entries(view.counts).map(([way, { far, judged, worst }], place) => {
    const farthest = worst ? `${far && worst[1].startsWith("batch/") ? "not equal" : `${shareText(worst[2] ?? Infinity)} times${worst[3] ? " of a factor" : ""}`}: \`${worst[1]}\`, step ${worst[0]}` : "";
    const further = place === Object.keys(view.counts).length - 1 && view.further ? `; ${view.further}` : "";
    return `| ${page.kind === "recording" ? "the run" : `${labelOf(number)}: ${view.verdict}`} | ${way} | ${far} of ${judged}${further} | ${farthest} |`;
  }));
  return lines.length ? ["| run | computed | wrong tensors | largest error / tolerated |", "|---|---|---|---|", ...lines, ""] : [];
}

function issueTitle() {
  const number = page.views.findIndex((view) => view.first);
  if (page.kind === "recording" && page.verdict !== "PASS") return `${withoutNumbers(page.lead)} (${page.title})`;
  if (number < 0) return `Lockstep: ${page.verdict}: ${page.title}`;
  const { first: [step, name], causes: [cause] } = page.views[number];
  return `${name} is wrong in step ${step}, ${labelOf(number)}${cause ? `: ${cause[0]}` : ""}: ${page.title}`;
}

/** What a sentence says is wrong, before how much. */
function withoutNumbers(sentence) {
  return sentence.split("; ")[0].replace(/: relative error.*/, "").replace(/ \([^()]* times what .*\).*/, "");
}

/** The tensors of a run that are wrong by themselves in its first wrong step, and how many others are wrong. */
function issueLines(view) {
  const run = page.kind === "recording" ? "the run" : labelOf(view);
  const [step] = page.views[view].first;
  const wrong = wrongByThemselves(view, step);
  const lines = wrong.slice(0, LISTED).map(([name, what]) => {
    const odd = [...oddOf(view, step, name).keys()];
    const copies = odd.length ? `not the same on all ranks that hold it: ${listed(odd)} ${odd.length === 1 ? "differs" : "differ"}` : "";
    return `| ${run} | ${step} | \`${name}\` | ${[what, copies].filter(Boolean).join("; ")} |`;
  });
  const names = new Set(tablesOfRun(view).flatMap((table) => table.far.map((place) => `${table.step} ${page.names[table.names[place]]}`)));
  for (const [name] of wrong) names.delete(`${step} ${name}`);
  return [...lines,
    ...(wrong.length > LISTED ? [`| ${run} | ${step} | and ${wrong.length - LISTED} more | |`] : []),
    ...(names.size ? [`| ${run} | | ${names.size.toLocaleString("en")} further wrong in all steps | they follow from these, or are the same in a later step |`] : [])];
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
