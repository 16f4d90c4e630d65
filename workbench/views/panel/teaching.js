// What a run tells a class: one step at a time with its messages, blame, what-if, calibration.

SECTIONS.push((() => {
  const AGAIN_MS = 1500, PHASE_MS = 900, calm = () => globalThis.matchMedia?.("(prefers-reduced-motion: reduce)").matches;

  /** A picture that the kernel drew, with its words to unfold. */
  function frame(caption, help) {
    const place = kit.h("div", { class: "wbp-picture" }), words = kit.h("pre", {});
    const none = kit.h("p", { class: "wbp-empty", hidden: true }), more = kit.h("details", { hidden: true }, kit.h("summary", {}, "This figure as text"), words);
    const head = help && kit.h("figcaption", {}, kit.h("b", {}, caption), kit.h("span", {}, help));
    const root = kit.h("figure", { class: "wbp-lesson", "aria-label": caption }, head, place, none, more);
    return {
      root, place,
      show({ svg, text }) {
        place.innerHTML = svg; // drawn by the kernel, which escapes words
        kit.text(words, text);
        kit.text(none, svg ? "" : text); // why there is no picture
        kit.show(none, !svg);
        kit.show(more, Boolean(svg));
        return place.firstElementChild;
      },
      clear() { place.replaceChildren(); kit.text(words, ""); for (const one of [none, more]) kit.show(one, false); },
    };
  }

  /** Let the messages of a step travel, phase after phase, as they did. */
  function play(svg, diagram) {
    if (!svg || calm()) return;
    let at = 0;
    diagram.phases.forEach((phase, p) => {
      const last = Math.max(0, ...phase.arrows.map((a) => a.order ?? 0)), each = PHASE_MS / (last + 1);
      phase.arrows.forEach((arrow, a) => {
        const group = svg.querySelector(`[data-arrow="${p}.${a}"]`), line = group?.querySelector("path.s"), head = group?.querySelector("path.f");
        if (!line) return;
        const timing = { delay: at + (arrow.order ?? 0) * each, duration: Math.max(250, each), fill: "backwards", easing: "ease-in-out" };
        const length = line.getTotalLength(), dots = line.getAttribute("stroke-dasharray");
        line.animate([{ strokeDasharray: `0 ${length}` }, { strokeDasharray: `${length} 0` }], { ...timing, fill: "backwards" }).finished.then(() => kit.attr(line, "stroke-dasharray", dots)).catch(() => {});
        head.animate([{ opacity: 0 }, { opacity: 0, offset: 0.85 }, { opacity: 1 }], timing);
        group.animate([{ opacity: 0.15 }, { opacity: 1 }], { ...timing, duration: 120 });
      });
      at += phase.arrows.length ? PHASE_MS : 250;
    });
  }

  function make(app, root) {
    const none = kit.h("p", { class: "wbp-empty" }, "Start a run first. Then you can look at its steps here.");
    const which = kit.field({ kind: "int", label: "Step number", min: 0, placeholder: "latest", onchange: () => { seen.step = ""; ask(); } });
    const again = kit.button("Play again", "Show again, one phase after the other, what was sent in this step", () => play(drawn, picture?.diagram));
    const hint = kit.h("span", { class: "wbp-muted" }, "Press \"Pause\" at the top of the panel, then \"One step\". Each step is shown here.");
    const step = frame("What happened in this step", "which worker sent what to which worker, with measured sizes and times");
    const blame = frame("Who waited for whom");
    const victim = kit.h("select", { class: "wbp-input", "aria-label": "What if this worker were as fast as the others?", onchange: () => { seen.what = ""; ask(); } });
    const what = frame("What if one worker were as fast as the others");
    what.place.before(kit.h("label", { class: "wbp-victimpick" }, "What if ", victim, " were as fast as the others?"));
    const calibrate = kit.button("Check the measurement", "Calibration: delay worker 1 by 50 ms in each step of a small separate run, and show the measured delay", doCalibrate);
    const said = kit.h("span", { class: "wbp-muted", role: "status" }), read = kit.h("div", { class: "wbp-read wbp-scroll", tabindex: "0", role: "region", "aria-label": "Results of the calibration" });
    const stepper = kit.h("div", { class: "wbp-row" }, which.root, again, hint);
    const lessons = kit.h("div", { class: "wbp-lessons" }, kit.h("div", {}, stepper, step.root), kit.h("div", { class: "wbp-column" }, blame.root, what.root));
    root.append(none, lessons, kit.h("figure", { class: "wbp-lesson" },
      kit.h("figcaption", {}, kit.h("b", {}, "Are the measured times right?"), kit.h("span", {}, "a test run with a known delay, and the delay that Workbench measures")), kit.h("div", { class: "wbp-row" }, calibrate, said), read));
    let measuring = false, held = false, latest = { run: null }, seen = {}, asking = false, asked = 0, drawn = null, picture = null;

    async function doCalibrate() {
      measuring = calibrate.disabled = true;
      kit.text(said, "measuring takes some seconds…");
      try {
        read.innerHTML = (await app.do("teaching.calibrate")).html; // made by the kernel, which escapes words
      } catch { /* the panel says why */ } finally { measuring = calibrate.disabled = false; kit.text(said, ""); }
    }

    /** Ask for the pictures that are out of date; the kernel makes them one after the other. */
    async function ask() {
      if (asking || !latest.run || !latest.steps) return;
      asking = true;
      asked = performance.now();
      const key = `${latest.run}#${latest.number}#${latest.steps}`, number = which.read();
      try {
        if (seen.step !== `${key}#${number}`) {
          seen.step = `${key}#${number}`;
          picture = await app.do("teaching.step", number === "" ? {} : { step: Number(number) });
          drawn = step.show(picture);
          if (picture.diagram && (latest.state === "paused" || latest.over)) play(drawn, picture.diagram);
        }
        if (seen.blame !== key) { seen.blame = key; blame.show(await app.do("teaching.blame")); }
        if (seen.what !== key && latest.workers > 1) {
          seen.what = key;
          what.show(await app.do("teaching.what_if", victim.value === "" ? {} : { without: Number(victim.value) }));
        }
      } catch { /* the panel says why */ } finally {
        asking = false;
        const now = `${latest.run}#${latest.number}#${latest.steps}`;
        if (now !== key) app.schedule(); // what was told meanwhile may have been the last news
      }
    }

    return {
      always: true,
      draw(value) {
        if (value.run !== latest.run || value.number !== latest.number) { seen = {}; asking = false; which.input.value = ""; for (const one of [step, blame, what]) one.clear(); }
        if (value.workers !== latest.workers) victim.replaceChildren(kit.h("option", { value: "" }, "the slowest worker"), ...Array.from({ length: value.workers }, (_, r) => kit.h("option", { value: r }, `worker ${r}`)));
        latest = value;
        kit.show(none, !value.run);
        kit.show(lessons, Boolean(value.run));
        kit.show(what.root, value.workers > 1 && value.steps > 0);
        kit.show(hint, ["running", "paused"].includes(value.state));
        kit.attr(which.input, "max", value.steps ? value.steps - 1 : null);
        const going = Boolean(value.run) && !value.over;
        calibrate.disabled = measuring || going;
        if (!measuring && going !== held) kit.text(said, going ? "The button \"Check the measurement\" needs free engines. Wait until this run is over." : "");
        held = going;
        again.disabled = !picture?.diagram;
        const due = performance.now() - asked > AGAIN_MS || value.state === "paused" || value.over;
        if (due) ask();
      },
    };
  }

  return { name: "teaching", tab: "teach", title: "Look closer", make };
})());
