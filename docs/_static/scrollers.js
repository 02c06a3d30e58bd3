// What scrolls sideways, such as a wide table or a long line of code, can be reached and scrolled by keyboard.
(() => {
  const boxes = "pre, .highlight, .table-wrapper, .input_area, .output_area, .figure-box";

  function mark() {
    for (const box of document.querySelectorAll(boxes)) {
      if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) {
        box.tabIndex = 0;
      } else {
        box.removeAttribute("tabindex");
      }
    }
  }

  addEventListener("load", mark);
  addEventListener("resize", mark);
  // A drop-down's content has a size only once it is open.
  document.addEventListener("toggle", mark, true);
})();
