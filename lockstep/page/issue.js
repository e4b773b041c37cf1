// What a maintainer needs, as Markdown: all failing runs and steps, whatever is open.

const LISTED = 12; // tensors of a run that are named

function issueText() {
  const lines = [`# ${issueTitle()}`, "", "Attach report.html: it has the map, the pictures and all numbers.", "", `**${page.verdict}**: ${page.title}`, "", ...(page.command ? ["```", page.command, "```"] : []), "", page.lead, "", ...issueVerdicts()];
  page.views.forEach((view, number) => {
    if (!view.first) return;
    const [step, name, what] = view.first;
    lines.push(`### First wrong tensor: ${labelOf(number)}`, "", `\`${name}\` in step ${step}: ${what}`, "", ...issueNumbers(number, page.names.indexOf(name), step));
    if (page.kind === "recording") lines.push(`- step ${step}: ${rightText(tableOf(number, step))}`);
    else lines.push(...(view.causes.length ? view.causes.map(([cause, evidence]) => `- cause: ${cause}: ${evidence}`) : ["- cause: not explained"]));
    for (const [title, said] of [["observed", view.observed], ["ruled out", view.excluded]]) {
      lines.push(...said.map((one) => `- ${title}: ${one}`));
    }
    lines.push("");
  });
  const runs = page.views.map((_, number) => number).filter((number) => page.kind !== "recording" || number === 0);
  const wrong = runs.flatMap(issueLines);
  if (wrong.length) lines.push("### Wrong by itself", "", "| run | step | tensor | what is wrong |", "|---|---|---|---|", ...wrong, "", ...runs.map(issueFollowing).filter(Boolean), "");
  if (page.sentences.length) lines.push("### Notes", "", ...page.sentences.map((one) => `- ${one}`), "");
  lines.push("### How this was found out", "", "Each tensor of the run against a float64 reference by one process from the same weights and batches (Lockstep).", "");
  lines.push(...page.found_out.map(([name, value]) => `- ${name}: ${value}`), "");
  return lines.join("\n");
}

function issueVerdicts() {
  const lines = page.views.flatMap((view, number) => Object.entries(view.counts).map(([way, { far, judged, worst }], place) => {
    const farthest = worst ? `${far && worst[1].startsWith("batch/") ? "not equal" : `${shareText(worst[2] ?? Infinity)} times${worst[3] ? " of a factor" : ""}`}: \`${worst[1]}\`, step ${worst[0]}` : "";
    const further = place === Object.keys(view.counts).length - 1 && view.further ? `; also wrong: ${view.further}` : "";
    return `| ${page.kind === "recording" ? "the run" : `${labelOf(number)}: ${view.verdict}`} | ${way} | ${far} of ${judged}${further} | ${farthest} |`;
  }));
  return lines.length ? ["| run | computed | wrong tensors | farthest, in times of what is tolerated |", "|---|---|---|---|", ...lines, ""] : [];
}

function runOf(view) {
  return page.kind === "recording" ? "the run" : labelOf(view);
}

function issueTitle() {
  const number = page.views.findIndex((view) => view.first);
  if (number < 0) return `Lockstep: ${page.verdict}: ${page.title}`;
  const [step, name] = page.views[number].first;
  return `${name} is wrong in step ${step}${page.kind === "recording" ? "" : `, ${labelOf(number)}`}: ${page.title}`;
}

/** The tensors of a run that are wrong by themselves, and those whose copies differ. */
function issueLines(view) {
  const wrong = wrongByThemselves(view).map(([table, name]) => [table.step, page.names[name], table.row(name).said || errorText(table.row(name))]);
  const copies = page.views[view].differing.map(([step, name, ranks]) => [step, name, `not the same on all ranks that hold it: ${listed(ranks)}`]);
  const all = [...wrong, ...copies];
  const lines = all.slice(0, LISTED).map(([step, name, what]) => `| ${runOf(view)} | ${step} | \`${name}\` | ${what} |`);
  return [...lines, ...(all.length > LISTED ? [`| ${runOf(view)} | | and ${all.length - LISTED} more | |`] : [])];
}

/** How many tensors are too far, and not by themselves. */
function issueFollowing(view) {
  const key = (table, name) => `${table.step} ${name}`;
  const itself = new Set(wrongByThemselves(view).map(([table, name]) => key(table, name)));
  const more = tables.filter((table) => (page.kind === "recording" || table.view === view) && wayOfTable(table) === FROM_BATCH)
    .flatMap((table) => table.far.map((place) => key(table, table.names[place]))).filter((one) => !itself.has(one));
  return more.length ? `${runOf(view)}: ${more.length.toLocaleString("en")} more ${plural("tensor", more.length)} ${more.length === 1 ? "is" : "are"} too far from the batch on, and right by ${more.length === 1 ? "itself" : "themselves"} or not judged so: what follows from a wrong tensor is wrong, too.` : "";
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
    lines.push(`- where: ${placeText(view, number, row)}`, "", "| index | run | reference |", "|---|---|---|");
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
