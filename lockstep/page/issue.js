// What a maintainer needs, as Markdown: all failing runs and steps, whatever is open.

const LISTED = 12; // tensors of a step that are named

function issueText() {
  const lines = [`**${page.verdict}**: ${page.title}`, "", ...(page.command ? ["```", page.command, "```"] : []), "", page.lead, "", ...issueVerdicts()];
  page.views.forEach((view, number) => {
    if (!view.first) return;
    const [step, name, what] = view.first;
    lines.push(`### First tensor that is too far: ${labelOf(number)}`, "", `\`${name}\` in step ${step}: ${what}`, "", ...issueNumbers(number, page.names.indexOf(name), step));
    if (page.kind === "recording") lines.push(`- step ${step}: ${rightText(tableOf(number, step))}`);
    else lines.push(...(view.causes.length ? view.causes.map(([cause, evidence]) => `- cause: ${cause}: ${evidence}`) : ["- cause: not explained"]));
    for (const [title, said] of [["observed", view.observed], ["by itself", view.by_itself ? [view.by_itself] : []], ["ruled out", view.excluded]]) {
      lines.push(...said.map((one) => `- ${title}: ${one}`));
    }
    lines.push("");
  });
  for (const [title, of] of [["modules by themselves", (table) => wayOfTable(table) === wayOf(true)], ["from the batch", (table) => wayOfTable(table) === wayOf(false)]]) {
    const far = page.tables.filter((table) => table.far.length && of(table));
    if (far.length) lines.push(`### All that is too far, ${title}`, "", "| run | step | tensor | times what is tolerated | what is wrong |", "|---|---|---|---|---|", ...far.flatMap(issueLines), "");
  }
  if (page.sentences.length) lines.push("### Notes", "", ...page.sentences.map((one) => `- ${one}`), "");
  lines.push("### How this was found out", "", "Each tensor of the run against a float64 reference by one process from the same weights and batches (Lockstep).", "");
  lines.push(...page.found_out.map(([name, value]) => `- ${name}: ${value}`), "");
  return lines.join("\n");
}

/** In which way the tensors of a table were computed. */
function wayOfTable(table) {
  return page.kind === "recording" ? page.views[table.view].name : wayOf(table.alone);
}

function issueVerdicts() {
  const lines = page.views.flatMap((view, number) => Object.entries(view.counts).map(([way, { far, judged, worst }], place) => {
    const farthest = worst ? `${shareText(worst[2] ?? Infinity)} times: \`${worst[1]}\`, step ${worst[0]}` : "";
    const further = place === 0 && view.further.length ? `; also wrong: ${view.further.join(", ")}` : "";
    return `| ${page.kind === "recording" ? "the run" : `${labelOf(number)}: ${view.verdict}`} | ${way} | ${far} of ${judged}${further} | ${farthest} |`;
  }));
  return lines.length ? ["| run | computed | tensors that are too far | farthest, in times of what is tolerated |", "|---|---|---|---|", ...lines, ""] : [];
}

function issueLines(table) {
  const run = page.kind === "recording" ? "the run" : labelOf(table.view);
  const lines = table.far.slice(0, LISTED).map((place) => {
    const row = tableOf(table.view, table.step, table.alone).row(table.names[place]);
    return `| ${run} | ${table.step} | \`${page.names[table.names[place]]}\` | ${shareText(row.share)} | ${row.said || errorText(row)} |`;
  });
  return [...lines, ...(table.far.length > LISTED ? [`| ${run} | ${table.step} | and ${table.far.length - LISTED} more | | |`] : [])];
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
