// Pages that are opened from disk may not start workers, so the worker of the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const base = new URL(url, location.href), inside = frame.contentWindow;
      const load = source => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: new URL(source, base), onload: resolve, onerror: reject });
        inside.document.body.append(script);
      });
      const send = (to, data) => to.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...sources) => sources.reduce((before, next) => before.then(() => load(next)), Promise.resolve());
      inside.postMessage = data => send(this, data);
      const ready = load(base);
      this.postMessage = data => ready.then(() => send(inside, data));
      this.terminate = () => frame.remove();
    }
  };
}
