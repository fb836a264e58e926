// Draws each chart into its place, at the width that there is, and again when that changes.
(() => {
  const NARROW = 520; // pixels below which labels get less room
  const places = [...document.querySelectorAll("[data-chart]")];
  const drawn = new Map(); // place: width and view of its chart
  const drawing = new Set();

  const sized = (spec, width) => {
    const narrow = width < NARROW;
    spec.params = spec.params.map((p) => (p.name === "narrow" ? { ...p, value: narrow } : p));
    spec.width = Math.max(width, 120);
    return spec;
  };

  // One drawing at a time for each place: of two at once, the one for an older width may end last.
  const draw = async (place) => {
    if (drawing.has(place)) return;
    drawing.add(place);
    try {
      for (let width; (width = Math.floor(place.clientWidth)) && drawn.get(place)?.width !== width;) {
        drawn.get(place)?.view.finalize();
        const spec = sized(JSON.parse(document.getElementById(place.dataset.chart).textContent), width);
        const { view } = await vegaEmbed(place, spec, {
          ast: true, actions: false, renderer: "svg", defaultStyle: false, tooltip: { disableDefaultStyle: true },
        });
        drawn.set(place, { width, view });
        place.dataset.drawn = "yes";
      }
    } finally {
      drawing.delete(place);
    }
  };

  // A chart is drawn when it comes near the screen: a report of several runs has dozens.
  const seen = new IntersectionObserver(
    (entries) => entries.filter((e) => e.isIntersecting).forEach((e) => { near.add(e.target); draw(e.target); }),
    { rootMargin: "1200px" },
  );
  const near = new Set();
  places.forEach((place) => seen.observe(place));
  let timer = 0;
  const resized = new ResizeObserver(() => { clearTimeout(timer); timer = setTimeout(() => near.forEach(draw), 120); });
  places.forEach((place) => resized.observe(place));
  const folded = [...document.querySelectorAll("details")];
  const unfold = () => folded.forEach((one) => { one.open = one.open || `#${one.id}` === location.hash; });
  addEventListener("hashchange", unfold);
  unfold();
  addEventListener("beforeprint", () => { folded.forEach((one) => { one.open = true; }); places.forEach(draw); });
})();
