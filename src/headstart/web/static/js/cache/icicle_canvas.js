/**
 * Icicle canvas: draws the tree of stretches, and moves the window on it. It draws only when something has changed.
 * @module
 */

import { boxAt, inside, layout, TALL, whole, zoomed } from "./icicle.js";
import { count } from "../format.js";
import { brightness } from "../tiers.js";

/** @typedef {import("./icicle.js").Box} Box */
/** @typedef {import("./icicle.js").Window} Window */
/** @typedef {import("./tree.js").CacheTree} CacheTree */
/** @typedef {import("./tree.js").Stretch} Stretch */

/** Pixels of the scale above the tree. */
const SCALE = 22;
/** Seconds after which it is drawn again, because time makes it darker. */
const FADE = 5;

/**
 * A flag at the end of a stretch: a slot that uses it.
 * @typedef {object} Flag
 * @property {string} id of a node
 * @property {string} text
 */

export class IcicleCanvas {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {CacheTree} tree
   * @param {{selected: (stretch: Stretch | undefined) => void, hovered: (box: Box | undefined, x: number, y: number) => void, caption: (stretch: Stretch) => string}} calls
   */
  constructor(canvas, tree, calls) {
    this.canvas = canvas;
    this.tree = tree;
    this.calls = calls;
    this.context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    /** @type {Flag[]} */
    this.flags = [];
    /** The id of the first node of the selected stretch. */
    this.selected = "";
    /** Milliseconds and boxes of the latest drawing. */
    this.cost = { milliseconds: 0, boxes: 0, drawings: 0 };
    /** @type {Box[]} */
    this._boxes = [];
    /** @type {Window} */
    this._window = whole(tree, 1, 1);
    this._fitted = true;
    this._frame = 0;
    this._timer = 0;
    /** @type {Map<number, {x: number, y: number}>} */
    this._pointers = new Map();
    this._moved = false;
    this._resize = new ResizeObserver(() => this.invalidate());
    this._theme = matchMedia("(prefers-color-scheme: dark)");
    this._again = () => this.invalidate();
    /** The theme may be chosen on the page too. */
    this._themed = new MutationObserver(this._again);
    this._listen();
  }

  /** It is seen from now on. */
  show() {
    this._resize.observe(this.canvas);
    this._theme.addEventListener("change", this._again);
    this._themed.observe(document.documentElement, { attributes: true });
    this._timer = window.setInterval(this._again, FADE * 1000);
    this.invalidate();
  }

  hide() {
    this._resize.disconnect();
    this._themed.disconnect();
    this._theme.removeEventListener("change", this._again);
    window.clearInterval(this._timer);
    cancelAnimationFrame(this._frame);
    this._frame = 0;
  }

  /** Something has changed. */
  invalidate() {
    if (!this._frame) this._frame = requestAnimationFrame(() => this._draw());
  }

  // ── the window ────────────────────────────────────────────────────────────────────────────────────────────────────

  fit() {
    this._fitted = true;
    this.invalidate();
  }

  /** @param {number} factor @param {number} [x] @param {number} [y] */
  zoom(factor, x = this._window.width / 2, y = this._window.height / 2) {
    this._look(zoomed(this._window, this.tree, x, y, factor, factor));
  }

  /** @param {number} x pixels @param {number} y pixels */
  pan(x, y) {
    this._look({ ...this._window, x: this._window.x + x / this._window.token, y: this._window.y + y / this._window.lane });
  }

  /** Shows a stretch and what follows it, as large as possible. @param {Stretch} stretch */
  open(stretch) {
    const { width, height } = this._window;
    const wanted = width / Math.max(1, stretch.reach - stretch.start);
    const taller = Math.min(TALL, height / stretch.lanes) / this._window.lane;
    const seen = zoomed(this._window, this.tree, 0, 0, wanted / this._window.token, taller);
    this._look({ ...seen, x: stretch.start, y: stretch.lane });
  }

  /** Moves the window if a stretch is outside. @param {Stretch} stretch */
  reveal(stretch) {
    const seen = this._window;
    const [right, bottom] = [seen.x + seen.width / seen.token, seen.y + seen.height / seen.lane];
    const x = stretch.stop <= seen.x || stretch.start >= right ? stretch.start - seen.width / seen.token / 4 : seen.x;
    const y =
      stretch.lane + stretch.lanes <= seen.y || stretch.lane >= bottom ? stretch.lane - seen.height / seen.lane / 4 : seen.y;
    if (x !== seen.x || y !== seen.y) this._look({ ...seen, x, y });
  }

  /** @param {Window} seen */
  _look(seen) {
    this._fitted = false;
    this._window = inside(seen, this.tree);
    this.invalidate();
  }

  // ── drawing ───────────────────────────────────────────────────────────────────────────────────────────────────────

  _draw() {
    this._frame = 0;
    const began = performance.now();
    const height = Math.min(Math.max(3, this.tree.lanes) * TALL + SCALE, Math.max(260, 0.58 * window.innerHeight));
    if (Math.abs(this.canvas.clientHeight - height) > 1) this.canvas.style.height = `${height}px`;
    const [width, tall, ratio] = [this.canvas.clientWidth, height - SCALE, window.devicePixelRatio || 1];
    if (!width) return;
    const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== across || this.canvas.height !== down)
      Object.assign(this.canvas, { width: across, height: down });
    this._window = this._fitted ? whole(this.tree, width, tall) : inside({ ...this._window, width, height: tall }, this.tree);
    this._boxes = layout(this.tree, this._window);
    const context = this.context;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(this.canvas);
    /** @param {string} name */
    const colour = (name) => style.getPropertyValue(`--${name}`).trim() || style.color;
    const paint = {
      memory: colour("tree-memory"),
      disk: colour("tree-disk"),
      text: colour("tree-text"),
      faint: colour("tree-faint"),
      warn: colour("tree-evicted"),
      pin: colour("tree-pin"),
      focus: colour("tree-focus"),
      back: colour("tree-back"),
      font: style.fontFamily,
    };
    this._scale(width, paint);
    context.save();
    context.beginPath();
    context.rect(0, SCALE, width, tall);
    context.clip();
    context.translate(0, SCALE);
    const now = Date.now() / 1000;
    for (const box of this._boxes) this._box(box, now, paint);
    this._marks(paint);
    context.restore();
    this.cost = { milliseconds: performance.now() - began, boxes: this._boxes.length, drawings: this.cost.drawings + 1 };
  }

  /** @param {number} width @param {Record<string, string>} paint */
  _scale(width, paint) {
    const { context } = this;
    const { x, token } = this._window;
    const step = stepOf(70 / token);
    context.font = `11px ${paint.font}`;
    context.fillStyle = paint.faint;
    context.textBaseline = "middle";
    for (let at = Math.ceil(x / step) * step; (at - x) * token < width; at += step) {
      const place = Math.round((at - x) * token) + 0.5;
      context.globalAlpha = 0.5;
      context.fillRect(place, SCALE - 6, 1, 6);
      context.globalAlpha = 1;
      const text = at ? count(at) : "0 tokens";
      if (place + 4 + context.measureText(text).width < width) context.fillText(text, place + 4, SCALE / 2 - 1);
    }
  }

  /** @param {Box} box @param {number} now @param {Record<string, string>} paint */
  _box(box, now, paint) {
    const { context } = this;
    const { stretch } = box;
    const gap = box.height > 6 ? 1 : 0;
    const [x, right] = [Math.max(-4, box.x), Math.min(this._window.width + 4, box.x + box.width)];
    const [y, width, height] = [
      box.y + gap,
      Math.max(1, right - x - (box.width > 3 ? 1 : 0)),
      Math.max(1, box.height - 2 * gap),
    ];
    const { memory, disk } = /** @type {Record<string, boolean>} */ (stretch.last.tiers);
    const bright = brightness(box.group ? stretch.newest : stretch.used, now);
    const colour = memory === undefined ? paint.disk : paint.memory;
    context.globalAlpha = bright;
    context.fillStyle = colour;
    context.fillRect(x, y, width, height);
    if (memory !== undefined && disk !== undefined) {
      const part = Math.max(1, Math.min(8, Math.round(height / 4)));
      context.fillStyle = paint.disk;
      context.fillRect(x, y + height - part, width, part);
    }
    context.globalAlpha = 1;
    if (box.group) {
      context.fillStyle = paint.back;
      for (let at = x + 5; at < x + width; at += 6) context.fillRect(at, y, 1, height);
    }
    const evicted = box.group ? stretch.evicted : stretch.children.length ? 0 : stretch.evicted;
    if (evicted) {
      context.fillStyle = paint.warn;
      context.fillRect(x, y, width, Math.min(3, height));
    }
    if (height >= 13 && width > 30) {
      const size = count(stretch.stop - stretch.start);
      const label = box.group
        ? box.height > 12
          ? `${count(box.group)} branches`
          : ""
        : evicted
          ? `${evicted}. ${size}`
          : size;
      context.fillStyle = legible(colour, paint.back, bright);
      this._label(
        label,
        box.group ? undefined : stretch,
        Math.max(x, 0) + 6,
        y + Math.min(height, TALL) / 2,
        right - Math.max(x, 0) - 12,
        paint.font,
      );
    }
  }

  /**
   * A number, and the first words of a stretch where there is room.
   * @param {string} label
   * @param {Stretch | undefined} stretch
   * @param {number} x
   * @param {number} y
   * @param {number} width
   * @param {string} font
   */
  _label(label, stretch, x, y, width, font) {
    const { context } = this;
    context.textBaseline = "middle";
    context.font = `600 12px ${font}`;
    const used = context.measureText(label).width;
    if (used > width) return;
    context.fillText(label, x, y);
    if (!stretch || width - used < 50) return;
    const words = this.calls.caption(stretch);
    if (!words) return;
    context.font = `12px ${font}`;
    const room = width - used - 8;
    let text = words;
    for (let left = words.length; left && context.measureText(text).width > room;) {
      left = Math.min(left - 1, Math.ceil((left * room) / context.measureText(text).width));
      text = `${words.slice(0, left)}…`;
    }
    context.fillText(text, x + used + 8, y);
  }

  /** Pins, checkpoints, slots and what is selected. @param {Record<string, string>} paint */
  _marks(paint) {
    const { context } = this;
    const { x: from, token, width: across } = this._window;
    const selected = this.tree.stretchOf(this.selected);
    /** @type {Map<Stretch, string[]>} */
    const flags = new Map();
    for (const flag of this.flags) {
      const stretch = this.tree.stretchOf(flag.id);
      if (stretch) flags.set(stretch, [...(flags.get(stretch) ?? []), flag.text]);
    }
    for (const box of this._boxes) {
      if (box.group) continue;
      const { stretch, y, height } = box;
      const right = box.x + box.width;
      if (stretch.last.pinned && height > 5) {
        context.fillStyle = paint.pin;
        context.fillRect(Math.max(0, box.x), y + 1, 3, height - 2);
        if (box.width > 26 && height > 20) pin(context, Math.min(right, across) - 12, y + 9);
      }
      if (height > 7) {
        context.fillStyle = paint.text;
        for (const position of stretch.checkpoints) diamond(context, (position - from) * token - 1, y + height - 5, 3.5);
      }
      const texts = flags.get(stretch);
      if (texts && height > 10) {
        context.font = `600 11px ${paint.font}`;
        const text = texts.join(", ");
        const size = context.measureText(text).width + 10;
        const at = Math.max(0, Math.min(right, across) - size - 2);
        context.fillStyle = paint.text;
        context.fillRect(at, y + 2, size, 14);
        context.fillStyle = paint.back;
        context.textBaseline = "middle";
        context.fillText(text, at + 5, y + 9.5);
      }
    }
    if (selected) this._outline(selected, paint.text);
  }

  /** @param {Stretch} stretch @param {string} colour */
  _outline(stretch, colour) {
    const box = this._boxes.find((one) => one.stretch === stretch);
    if (!box) return;
    const x = Math.max(1, box.x + 1);
    const width = Math.min(this._window.width - 1, box.x + box.width - 1) - x;
    this.context.strokeStyle = colour;
    this.context.lineWidth = 2.5;
    this.context.strokeRect(x, box.y + 1, Math.max(2, width), Math.max(2, box.height - 2));
  }

  // ── pointers ──────────────────────────────────────────────────────────────────────────────────────────────────────

  _listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this._wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      this._pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
      this._moved = this._pointers.size > 1;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => this._move(event));
    canvas.addEventListener("pointerleave", () => this.calls.hovered(undefined, 0, 0));
    canvas.addEventListener("pointercancel", (event) => this._pointers.delete(event.pointerId));
    canvas.addEventListener("pointerup", (event) => {
      this._pointers.delete(event.pointerId);
      if (!this._moved) this._press(event.offsetX, event.offsetY);
    });
    canvas.addEventListener("dblclick", (event) => {
      const box = boxAt(this._boxes, event.offsetX, event.offsetY - SCALE);
      if (box) this.open(box.stretch);
      else this.fit();
    });
  }

  /** @param {number} x @param {number} y */
  _press(x, y) {
    const box = boxAt(this._boxes, x, y - SCALE);
    if (box?.group) this.zoom(2.5, x, y - SCALE);
    else this.calls.selected(box?.stretch);
  }

  /** @param {WheelEvent} event */
  _wheel(event) {
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(-event.deltaY / 250), event.offsetX, event.offsetY - SCALE);
    else {
      const before = this._window;
      this.pan(event.deltaX, event.deltaY);
      if (before.x === this._window.x && before.y === this._window.y) return; // the page scrolls
    }
    event.preventDefault();
  }

  /** @param {PointerEvent} event */
  _move(event) {
    const known = this._pointers.get(event.pointerId);
    const [x, y] = [event.offsetX, event.offsetY];
    if (!known) {
      this.calls.hovered(boxAt(this._boxes, x, y - SCALE), x, y);
      return;
    }
    const others = [...this._pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    if (others.length) {
      const [before, after] = [
        Math.hypot(known.x - others[0].x, known.y - others[0].y),
        Math.hypot(x - others[0].x, y - others[0].y),
      ];
      if (before > 10) this.zoom(after / before, others[0].x, others[0].y - SCALE);
    } else if (this._moved || Math.hypot(x - known.x, y - known.y) > 4) {
      this._moved = true;
      this.pan(known.x - x, known.y - y);
    } else return;
    this._pointers.set(event.pointerId, { x, y });
  }
}

/** The smallest of 1, 2, 5, 10, 20, … that is as large as a number. @param {number} least */
function stepOf(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return power * ([1, 2, 5].find((digit) => digit * power >= least) ?? 10);
}

/**
 * The colour of a text on a colour that lies on a ground.
 * @param {string} colour `rgb(1, 2, 3)`
 * @param {string} ground
 * @param {number} share of the colour
 */
function legible(colour, ground, share) {
  const [one, other] = [colour, ground].map((text) => (text.match(/[\d.]+/g) ?? []).slice(0, 3).map(Number));
  const [red, green, blue] = one.map((value, at) => ((share * value + (1 - share) * (other[at] ?? 0)) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#101418" : "#ffffff";
}

/** @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} size */
function diamond(context, x, y, size) {
  context.beginPath();
  context.moveTo(x, y - size);
  context.lineTo(x + size, y);
  context.lineTo(x, y + size);
  context.lineTo(x - size, y);
  context.fill();
}

/** @param {CanvasRenderingContext2D} context @param {number} x @param {number} y */
function pin(context, x, y) {
  context.beginPath();
  context.arc(x, y, 4, 0, 2 * Math.PI);
  context.fill();
  context.fillRect(x - 0.75, y + 3, 1.5, 7);
}
