// Hides the hazards that no chosen Megatron has, and the columns of the others. A framework chooses the
// Megatrons that it pins, and leaves no others to choose from.
document$.subscribe(() => {
  const framework = document.getElementById("framework");
  const megatron = document.getElementById("megatron");
  if (!framework || !megatron) return;
  const show = () => {
    const pinned = framework.selectedOptions[0].dataset.megatrons;
    const offered = pinned ? JSON.parse(pinned) : null;
    [...megatron.options].slice(1).forEach((option) => {
      option.hidden = option.disabled = offered !== null && !offered.includes(option.value);
    });
    if (megatron.selectedOptions[0].disabled) megatron.value = "";
    const chosen = megatron.value ? [megatron.value] : offered;
    const isShown = (name) => chosen === null || chosen.includes(name);
    const table = document.querySelector(".matrix table");
    [...table.querySelectorAll("thead th")].slice(1).forEach((head) => {
      head.hidden = !isShown(head.textContent);
    });
    table.querySelectorAll("tbody tr").forEach((row) => {
      let here = chosen === null;
      row.querySelectorAll("td").forEach((cell) => {
        cell.hidden = !isShown(cell.dataset.megatron);
        here = here || (!cell.hidden && cell.classList.contains("here"));
      });
      row.hidden = !here;
    });
    document.querySelectorAll("[data-framework]").forEach((note) => {
      note.hidden = note.dataset.framework !== framework.value;
    });
  };
  framework.addEventListener("change", show);
  megatron.addEventListener("change", show);
  show(); // a browser may have kept what was chosen before
});
