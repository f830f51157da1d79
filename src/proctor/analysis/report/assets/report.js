"use strict";
// The page is whole without this. It adds: a filter of the matrix, opening the trial that a link leads to, and focus.
(() => {
  const reveal = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (!target) return;
    const folded = target.closest("details");
    if (folded && !folded.open) { folded.open = true; target.scrollIntoView(); }
    if (target.tabIndex === -1) target.focus({ preventScroll: true });
  };
  addEventListener("hashchange", reveal);
  reveal();

  const form = document.querySelector("form.filter");
  if (!form) return;
  const rows = Array.from(document.querySelectorAll("table.matrix tbody tr"));
  const names = rows.map((row) => row.cells[0].textContent.toLowerCase());
  const said = form.querySelector("output");
  const filter = () => {
    const text = form.elements.text.value.toLowerCase();
    let shown = 0;
    rows.forEach((row, place) => {
      const keep = names[place].includes(text) && (!form.elements.d.checked || row.dataset.d === "1")
        && (!form.elements.u.checked || row.dataset.u === "1");
      row.hidden = !keep;
      shown += keep;
    });
    said.textContent = shown === rows.length ? "" : `${shown} of ${rows.length} tasks`;
  };
  form.hidden = rows.length < 2;
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
})();
