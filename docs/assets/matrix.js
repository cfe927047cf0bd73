// Hides the hazards that the chosen Megatron does not have, and the other columns.
document$.subscribe(() => {
  const chooser = document.getElementById("megatron");
  if (!chooser) return;
  chooser.addEventListener("change", () => {
    const chosen = chooser.value;
    const table = document.querySelector(".matrix table");
    const heads = [...table.querySelectorAll("thead th")];
    heads.slice(1).forEach((head) => { head.hidden = chosen !== "" && head.textContent !== chosen; });
    table.querySelectorAll("tbody tr").forEach((row) => {
      let here = chosen === "";
      row.querySelectorAll("td").forEach((cell) => {
        const its = cell.dataset.megatron === chosen;
        cell.hidden = chosen !== "" && !its;
        here = here || (its && cell.classList.contains("here"));
      });
      row.hidden = !here;
    });
  });
});
