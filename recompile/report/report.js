// Sorting, filtering and "show all" of tables; the tooltip of the timeline; the link to the words. Without script everything can be read.
"use strict";

const NAMES = ["kept for backward", "gradients", "computed again", "outputs and temporaries"];

function made(tag, text, css) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (css) element.className = css;
  return element;
}

function setUpTable(box) {
  const body = box.querySelector("tbody");
  const heads = [...box.querySelectorAll("thead th")];
  const filter = box.querySelector("input");
  const limit = window.matchMedia("(max-width: 900px)").matches ? 8 : Number(box.dataset.shown);
  const button = made("button", "", "all");
  button.type = "button";
  const nothing = made("p", "No row has this.", "none");
  let isWhole = false;

  function show() {
    const wanted = filter ? filter.value.trim().toLowerCase() : "";
    let found = 0;
    for (const row of body.rows) {
      const text = `${row.textContent} ${row.dataset.find || ""}`;
      const fits = !wanted || text.toLowerCase().includes(wanted);
      if (fits) found += 1;
      row.hidden = !fits || (!isWhole && found > limit && !row.classList.contains("this"));
    }
    nothing.hidden = found > 0;
    button.hidden = isWhole || found <= limit;
    button.textContent = `show all ${found} rows`;
  }

  function sortBy(place) {
    const head = heads[place];
    const isNumber = head.classList.contains("num");
    const before = head.getAttribute("aria-sort");
    const isDescending = before ? before === "ascending" : isNumber;
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
    const key = (row) => {
      const cell = row.cells[place];
      return isNumber ? Number(cell.dataset.v) : cell.textContent;
    };
    const order = (a, b) => (isNumber ? a[0] - b[0] : a[0].localeCompare(b[0], "en", { numeric: true }));
    const rows = [...body.rows].map((row) => [key(row), row]).sort(order);
    if (isDescending) rows.reverse();
    body.append(...rows.map((pair) => pair[1]));
    show();
  }

  heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => sortBy(place)));
  if (filter) filter.addEventListener("input", show);
  button.addEventListener("click", () => {
    isWhole = true;
    show();
  });
  box.append(nothing, button);
  show();
}

function setUpTimeline(box) {
  const moments = JSON.parse(box.querySelector("script").textContent);
  const tip = document.getElementById("tip");
  for (const chart of box.querySelectorAll("svg")) {
    const { left, right, total } = chart.dataset;
    const cursor = chart.querySelector(".cursor");
    const hide = () => {
      tip.style.display = "none";
      cursor.style.visibility = "hidden";
    };
    const move = (event) => {
      const frame = chart.getBoundingClientRect();
      const x = ((event.clientX - frame.left) * chart.viewBox.baseVal.width) / frame.width;
      const seconds = ((x - left) / (right - left)) * total;
      const moment = moments.find((each) => each[0] >= seconds) || moments[moments.length - 1];
      if (!moment) return;
      const [, name, where, live, ...bands] = moment;
      tip.replaceChildren(made("p", name), made("p", where, "muted"), made("p", `${live} alive`));
      bands.forEach((bytes, k) => bytes !== "0 B" && tip.append(made("p", `${bytes} ${NAMES[k]}`, "muted")));
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.style.visibility = "visible";
      tip.style.display = "block";
      const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
      tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, room))}px`;
      tip.style.top = `${Math.max(8, event.clientY - tip.offsetHeight - 14)}px`;
    };
    const surface = chart.querySelector(".hover");
    surface.addEventListener("pointermove", move);
    surface.addEventListener("pointerdown", move);
    surface.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
    document.addEventListener("pointerdown", (event) => event.target !== surface && hide());
  }
}

document.querySelectorAll(".table").forEach(setUpTable);
document.querySelectorAll(".timeline").forEach(setUpTimeline);
document.querySelector('a[href="#reading"]').addEventListener("click", () => {
  document.querySelector(".reading").open = true;
});
