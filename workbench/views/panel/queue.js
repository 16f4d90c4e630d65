// Run and the queue: the bar at the top, the list on the Run tab.

SECTIONS.push((() => {
  function make(app, root) {
    const run = kit.button("Run", "Run the selected strategies, one after the other", begin, "wbp-primary wbp-run");
    const pause = kit.button("Pause", "Pause the run after the current step", () => app.do(paused ? "live.resume" : "live.pause"));
    const one = kit.button("One step", "Do one more step, then pause again", () => app.do("live.step", { steps: 1 }));
    const stop = kit.button("Stop", "Stop the run after the current step", () => app.do("live.stop"), "wbp-danger");
    const all = kit.button("Stop all", "Stop the run and clear the queue", () => app.do("queue.stop_all"), "wbp-danger");
    const words = kit.h("span", { class: "wbp-summary", role: "status" });
    const track = kit.h("progress", { max: 1, class: "wbp-progress", "aria-label": "Progress of all runs" });
    root.append(kit.h("div", { class: "wbp-row" }, run, pause, one, stop, all, kit.h("span", { class: "wbp-together" }, words, track)));
    let paused = false, problem = "";

    /** What is wrong stands on the Choose tab, so it is there that one is left. */
    function begin() {
      app.do("queue.run");
      if (!problem) app.open("run");
      else if (app.opened !== "setup") app.open("setup");
    }

    return {
      always: true,
      draw(value, parts) {
        const { live, strategies, panel } = parts, starting = (panel?.doing ?? []).includes("queue.run");
        const going = ["starting", "running", "paused", "recovering", "stopping"].includes(live?.state);
        const waiting = value.items.filter((i) => i.state === "waiting").length;
        paused = live?.state === "paused";
        problem = strategies?.problem ?? "";
        run.disabled = starting;
        if (value.busy) kit.rename(run, "Add to the queue", "Add the selected strategies to the end of the queue");
        else kit.rename(run, "Run", "Run the selected strategies, one after the other");
        if (paused) kit.rename(pause, "Resume", "Continue the run");
        else kit.rename(pause, "Pause", "Pause the run after the current step");
        for (const button of [pause, stop]) { kit.show(button, going); button.disabled = live?.state === "stopping"; }
        pause.disabled ||= !["running", "paused"].includes(live?.state);
        kit.show(one, paused);
        kit.show(all, value.busy && waiting > 0);
        kit.show(track, value.busy);
        track.value = value.progress;
        const over = value.items.filter((i) => !["waiting", "running"].includes(i.state)).length;
        const left = value.remaining_s == null ? "" : `, ${paused ? "paused, " : ""}about ${kit.left(value.remaining_s)} left`;
        kit.text(words, starting ? "starting…" : value.busy ? `run ${Math.min(over + 1, value.items.length)} of ${value.items.length}${left}` : strategies?.summary ?? "");
      },
    };
  }

  return { name: "queue", tab: "top", order: 1, title: "Run", make };
})());

SECTIONS.push((() => {
  function make(app, root) {
    const none = kit.h("p", { class: "wbp-empty" }, "The queue is empty. Choose one or several strategies and press Run. The strategies run one after the other.");
    const list = kit.h("ol", { class: "wbp-lineup" });
    const going = kit.field({ kind: "bool", label: "If a run fails, continue with the next run", onchange: (on) => app.do("queue.keep_going", { on }) });
    const clear = kit.button("Clear", "Clear the queue", () => app.do("queue.clear"));
    root.append(none, list, kit.h("div", { class: "wbp-row" }, going.root, clear));

    function item(i) {
      const name = kit.h("b", {}), about = kit.h("span", { class: "wbp-muted" }), state = kit.h("span", { class: "wb-state" });
      const bar = kit.h("progress", { max: 1, class: "wbp-progress", "aria-label": "Progress of this run" });
      const sooner = kit.button("↑", "Run earlier", () => app.do("queue.move", { number: i.number, to: Math.max(0, element.wbp.place - 1) }), "wbp-small");
      const later = kit.button("↓", "Run later", () => app.do("queue.move", { number: i.number, to: element.wbp.place + 1 }), "wbp-small");
      const remove = kit.button("×", "Remove from the queue", () => app.do("queue.remove", { number: i.number }), "wbp-small");
      const show = kit.button("Show", "Show this run below", () => app.do("live.pick", { run: element.wbp.run }), "wbp-small");
      const why = kit.h("details", { class: "wbp-why", hidden: true }, kit.h("summary", {}), kit.h("pre", {}));
      const element = kit.h("li", {}, kit.h("div", { class: "wbp-row" }, name, about, state, bar, sooner, later, remove, show), why);
      element.wbp = { name, about, state, bar, sooner, later, remove, show, why, place: 0, run: "" };
      return element;
    }

    function update(element, i, place) {
      const own = element.wbp, waiting = i.state === "waiting";
      Object.assign(own, { place, run: i.run });
      kit.text(own.name, i.run ?? i.name);
      kit.text(own.about, `${i.strategy} · ${i.workers} worker${i.workers === 1 ? "" : "s"}${i.seed == null ? "" : ` · seed ${i.seed}`}`);
      kit.text(own.state, i.state);
      own.state.dataset.state = i.state;
      kit.show(own.bar, ["running", "paused"].includes(i.state));
      own.bar.value = i.fraction;
      for (const button of [own.sooner, own.later, own.remove]) kit.show(button, waiting);
      kit.show(own.show, Boolean(i.run) && !["waiting", "running", "paused"].includes(i.state));
      const reason = i.error || i.why;
      kit.show(own.why, Boolean(reason));
      kit.text(own.why.firstChild, (reason ?? "").split("\n")[0]);
      kit.text(own.why.lastChild, reason ?? "");
    }

    return {
      always: true, // a pause is the run's news, not the queue's
      draw(value, all) {
        kit.show(none, !value.items.length);
        let place = -1;
        kit.list(list, value.items, (i) => i.number, item, (element, i) => update(element, i.state === "running" && all.live?.state === "paused" ? { ...i, state: "paused" } : i, i.state === "waiting" ? ++place : 0));
        going.set(value.keep_going);
        kit.show(clear, value.items.some((i) => i.state === "waiting"));
        kit.show(going.root, value.items.length > 1);
      },
    };
  }

  return { name: "queue", tab: "run", order: 1, title: "Queue", make };
})());
