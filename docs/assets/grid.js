// Draws a grid below the link to it. A grid is a JSON file of assets/grids/, which Python writes
// (benchmarks/_grid.py): sections, each with a title and blocks. A block is a text, a list, a picture or a table.
(() => {
  const made = (name, ...children) => {
    const element = document.createElement(name);
    element.append(...children);
    return element;
  };
  // Shows what stands between backticks as code.
  const marked = (text) =>
    text.split("`").map((part, at) => (at % 2 ? made("code", part) : part)).filter((part) => part !== "");
  const cells = (kind, row) => made("tr", ...row.map((cell) => made(kind, ...marked(cell))));
  const kinds = {
    text: ({ text }) => made("p", ...marked(text)),
    list: ({ list }) => made("ul", ...list.map((item) => made("li", ...marked(item)))),
    picture: ({ picture, alt }, grid) =>
      made("p", Object.assign(document.createElement("img"), { src: new URL(picture, grid).href, alt })),
    rows: ({ head, rows }) => {
      const body = made("tbody", ...rows.map((row) => cells("td", row)));
      const table = made("div", made("table", made("thead", cells("th", head)), body));
      table.className = "matrix";
      return table;
    },
  };
  const block = (item, grid) => kinds[Object.keys(kinds).find((kind) => kind in item)](item, grid);
  const section = ({ title, blocks }, grid) =>
    made("details", made("summary", ...marked(title)), ...blocks.map((item) => block(item, grid)));

  document$.subscribe(() => {
    document.querySelectorAll(".md-content a[href*='assets/grids/']").forEach(async (link) => {
      const answer = await fetch(link.href);
      if (!answer.ok) return; // the link stays
      const sections = (await answer.json()).map((item) => section(item, link.href));
      link.closest("p, li").after(...sections);
    });
  });
})();
