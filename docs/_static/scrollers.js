// What a block printed breaks between words, unless it has columns.
//
// What scrolls sideways, such as a wide table or a long line of code, can be reached and scrolled by keyboard. Where it
// goes on to the right, it fades out there: a phone shows no scroll bar.
(() => {
  const boxes = "pre, .highlight, .table-wrapper, .input_area, .output_area, .figure-box";

  function shade(box) {
    box.classList.toggle("goes-on", box.scrollWidth - box.clientWidth - box.scrollLeft > 1);
  }

  function mark() {
    for (const box of document.querySelectorAll(boxes)) {
      if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) {
        box.tabIndex = 0;
      } else {
        box.removeAttribute("tabindex");
      }
      shade(box);
    }
  }

  addEventListener("load", () => {
    for (const printed of document.querySelectorAll("div.highlight-output pre, div.highlight-text pre, div.output_area pre")) {
      printed.classList.toggle("sentences", !/\S {3,}\S/.test(printed.textContent));
    }
    mark();
  });
  addEventListener("resize", mark);
  document.addEventListener("scroll", (event) => event.target.matches?.(boxes) && shade(event.target), true);
  // A drop-down's content has a size only once it is open.
  document.addEventListener("toggle", mark, true);
})();
