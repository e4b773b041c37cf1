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
    for (const [title, said] of [["observed", view.observed], ["by itself", view.by_itself ? [view.by_itself] : []], ["excluded", view.excluded]]) {
      lines.push(...said.map((one) => `- ${title}: ${one}`));
    }
    lines.push("");
  });
  const far = page.tables.filter((table) => table.far.length).map(issueLine);
  if (far.length) lines.push("### All that is too far, in times of what is tolerated", "", ...far, "");
  if (page.sentences.length) lines.push("### Notes", "", ...page.sentences.map((one) => `- ${one}`), "");
  lines.push("### How this was found out", "", "Each tensor of the run against a float64 reference by one process from the same weights and batches (Lockstep).", "");
  lines.push(...page.found_out.map(([name, value]) => `- ${name}: ${value}`), "");
  return lines.join("\n");
}

function issueVerdicts() {
  const line = (view, number) => {
    const worst = view.worst ? `${shareText(view.worst[2] ?? Infinity)} \`${view.worst[1]}\`, step ${view.worst[0]}` : "";
    return `| ${labelOf(number)} | ${page.kind === "recording" ? (view.first ? "too far" : "near enough") : view.verdict} | ${worst} | ${view.num_failures} | ${view.counted} |`;
  };
  return page.views.length ? ["| | verdict | farthest, in times of what is tolerated | too far | judged |", "|---|---|---|---|---|", ...page.views.map(line), ""] : [];
}

function issueLine(table) {
  const far = table.far.map((place) => `\`${page.names[table.names[place]]}\` ${shareText(table.columns.share[place] ?? Infinity)}`);
  const more = far.length > LISTED ? `, and ${far.length - LISTED} more` : "";
  return `- ${labelOf(table.view)}, step ${table.step}${page.kind === "recording" ? "" : `, ${wayOf(table.alone)}`}: ${far.slice(0, LISTED).join(", ")}${more}`;
}

function issueNumbers(view, number, step) {
  const row = wrongRowOf(view, step, number);
  if (row === null) return [];
  const lines = row.error === undefined ? [] : ["| | error | tolerated |", "|---|---|---|", `| 2-norm, relative | ${sci(row.error)} | ${sci(row.tolerated, 1)} |`, `| largest element, relative | ${sci(row.largest)} | ${sci(row.toleratedLargest, 1)} |`, ""];
  if (row.picture) {
    lines.push(whereText(view, number, row), "", "| index | run | reference |", "|---|---|---|");
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
