/**
 * Dom: builds elements. Text only ever becomes text: nothing here reads markup, and only known tags and attributes are made.
 * @module
 */

const TAGS = words(`
  a article aside b blockquote br button canvas code datalist dd del details dialog div dl dt em fieldset figcaption
  figure footer form h1 h2 h3 h4 h5 h6 header hr i img input kbd label legend li main mark meter nav ol optgroup
  option output p pre progress s section select small span strong sub summary sup table tbody td textarea tfoot th
  thead time tr u ul wbr
`);
const SHAPES = words(`
  circle defs g line linearGradient path polygon polyline rect stop svg text title tspan
`);
const ATTRIBUTES = words(`
  accept alt autocomplete autofocus checked class cols colspan dir disabled download enterkeyhint for form height
  hidden href id inputmode label lang list max maxlength method min minlength multiple name novalidate open pattern
  placeholder readonly rel required role rows rowspan scope selected size spellcheck src start step tabindex target
  title type value width wrap clip-path cx cy d dominant-baseline dx dy fill fill-opacity font-size offset opacity
  points preserveAspectRatio r rx ry stroke stroke-dasharray stroke-linecap stroke-linejoin stroke-opacity stroke-
  width text-anchor transform vector-effect viewBox x x1 x2 y y1 y2
`);
const OPEN_ATTRIBUTES = /^(?:aria|data)-[a-z-]+$/;
const ADDRESSES = words("http: https: mailto: blob:");

/** @param {string} text */
function words(text) {
  return new Set(text.trim().split(/\s+/));
}

/**
 * @typedef {Node | string | number | null | undefined | false | Child[]} Child
 * @typedef {Record<string, any>} Attributes
 *   Attributes by name; null, undefined and false leave one out. Beside them: `on`, listeners by event; `style`, properties.
 */

/**
 * An element of HTML.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function h(tag, attributes = {}, ...children) {
  if (!TAGS.has(tag)) throw new TypeError(`no tag ${tag}`);
  return /** @type {any} */ (filled(document.createElement(tag), attributes, children));
}

/**
 * An element of SVG.
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {SVGElement}
 */
export function s(tag, attributes = {}, ...children) {
  if (!SHAPES.has(tag)) throw new TypeError(`no shape ${tag}`);
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  return /** @type {any} */ (filled(made, attributes, children));
}

/**
 * @template {Element} T
 * @param {T} element
 * @param {Attributes} attributes
 * @param {Child[]} children
 * @returns {T}
 */
function filled(element, attributes, children) {
  set(element, attributes);
  append(element, children);
  return element;
}

/**
 * Changes attributes.
 * @param {Element} element
 * @param {Attributes} attributes
 */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [property, one] of Object.entries(value)) {
        /** @type {HTMLElement} */ (element).style.setProperty(property, String(one));
      }
    } else if (!ATTRIBUTES.has(name) && !OPEN_ATTRIBUTES.test(name)) {
      throw new TypeError(`no attribute ${name}`);
    } else if (value === null || value === undefined || value === false) {
      element.removeAttribute(name);
    } else if ((name === "href" || name === "src") && !isAddress(String(value))) {
      throw new TypeError("no such address");
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
}

/**
 * Whether a link may have this address: one of this page, or one that runs nothing.
 * @param {string} address
 */
export function isAddress(address) {
  return ADDRESSES.has(URL.parse(address, document.baseURI)?.protocol ?? "");
}

/**
 * @param {Element} element
 * @param {Child} children
 */
function append(element, children) {
  if (Array.isArray(children)) for (const child of children) append(element, child);
  else if (children !== null && children !== undefined && children !== false) element.append(/** @type {any} */ (children));
}

/**
 * Replaces what is in an element.
 * @template {Element} T
 * @param {T} element
 * @param {...Child} children
 * @returns {T}
 */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}
