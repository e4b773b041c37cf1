// What a maintainer needs, as Markdown.

function issueText(state) {
  const view = page.views[state.view];
  const lines = [`**${page.verdict}**: ${page.kind === "recording" || !view ? page.title : `${view.label}, ${page.title}`}`, ""];
  if (page.kind === "recording") lines.push(page.lead, "");
  if (view?.first) {
    const [step, name, what] = view.first;
    lines.push("### First tensor that is too far", "", `\`${name}\` in step ${step}: ${what}`, "");
    lines.push(...issueNumbers(state, page.names.indexOf(name), step));
    if (page.kind === "recording") lines.push(`- step ${step}: ${rightText(tableOf(state.view, step))}`);
    else lines.push(...(view.causes.length ? view.causes.map(([cause, evidence]) => `- cause: ${cause}: ${evidence}`) : ["- cause: not explained"]));
    for (const [title, said] of [["observed", view.observed], ["by itself", view.by_itself ? [view.by_itself] : []], ["excluded", view.excluded]]) {
      lines.push(...said.map((one) => `- ${title}: ${one}`));
    }
    lines.push("", `${view.num_failures} tensors are too far in all.`, "");
  }
  lines.push("### How this was found out", "", "Each tensor of the run against a float64 reference by one process from the same weights and batches (Lockstep).", "");
  lines.push(...page.found_out.map(([name, value]) => `- ${name}: ${value}`), "");
  return lines.join("\n");
}

function issueNumbers(state, number, step) {
  const row = wrongRowOf(state.view, step, number);
  if (row === null) return [];
  const lines = row.error === undefined ? [] : ["| | error | tolerated |", "|---|---|---|", `| 2-norm, relative | ${sci(row.error)} | ${sci(row.tolerated)} |`, `| largest element, relative | ${sci(row.largest)} | ${sci(row.toleratedLargest)} |`, ""];
  if (row.picture) {
    lines.push(whereText(state.view, number, row), "", "| index | run | reference |", "|---|---|---|");
    lines.push(...row.picture.elements.slice(0, 4).map(([index, own, reference]) => `| [${index.join(", ")}] | ${digits(own)} | ${digits(reference)} |`), "");
  }
  return lines;
}

function openIssue(state) {
  const text = el("textarea", { readonly: true, "aria-label": "The issue as Markdown" });
  text.value = issueText(state);
  const said = el("span", { role: "status", class: "quiet" });
  const copy = async () => {
    text.select();
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
}
