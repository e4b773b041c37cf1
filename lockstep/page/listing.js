// A table to sort by a column and to filter by words.

const body = document.querySelector("#listing tbody");
const lines = [...body.rows];
const heads = [...document.querySelectorAll("#listing thead th")];

/** Numbers by size, "step 3" and "1.2e-6 of 4e-6" too; texts by letters; empty cells last. */
function key(line, column) {
  const text = line.cells[column].textContent;
  const number = text.match(/-?\d+(\.\d+)?(e[+-]?\d+)?/i);
  return { text, number: number && /^(step |-?\d)/.test(text) ? Number(number[0]) : null };
}

heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
  const down = head.getAttribute("aria-sort") === "ascending";
  heads.forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  lines.sort((one, two) => {
    const [a, b] = [key(one, column), key(two, column)];
    if (a.text === "" || b.text === "") return a.text === b.text ? 0 : a.text === "" ? 1 : -1;
    const order = a.number !== null && b.number !== null ? a.number - b.number : a.text.localeCompare(b.text, "en");
    return down ? -order : order;
  });
  body.append(...lines);
}));

document.getElementById("filter").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const line of lines) line.hidden = !words.every((word) => line.textContent.toLowerCase().includes(word));
  document.getElementById("count").textContent = `${lines.filter((line) => !line.hidden).length} of ${lines.length} rows`;
});
