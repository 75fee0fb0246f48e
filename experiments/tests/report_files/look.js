// Appended to a copy of a report: says how it looks, in the words of the browser that draws it.
const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
const luminance = (colour) => {
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = numbers(colour).map((c) => linear(c / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
// As WCAG 2 counts it: 1 to 21.
const contrast = (one, other) => {
  const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
};
const style = (element) => getComputedStyle(element);
const behind = (element) => {
  const colour = style(element).backgroundColor;
  const shows = numbers(colour).length === 3 || numbers(colour)[3] > 0;
  return shows ? colour : behind(element.parentElement);
};
const is_drawn = (element) => element.getClientRects().length > 0;
const least = (found) => found.sort((a, b) => a.contrast - b.contrast)[0];

const texts = [];
const nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = nodes.nextNode(); node; node = nodes.nextNode()) {
  const element = node.parentElement;
  if (node.data.trim() === "" || !is_drawn(element)) continue;
  const colour = element.closest("svg") ? style(element).fill : style(element).color;
  texts.push({ contrast: contrast(colour, behind(element)), of: node.data.trim() });
}
const marks = [];
const lines = ".chart polyline[stroke-width='19'], .chart polyline[stroke-width='13']";
const shapes = ".bar, .chart polygon, .chart circle, .chart rect:not(.hit)";
for (const element of document.querySelectorAll(`${lines}, ${shapes}`)) {
  const filled = element.matches("polygon, rect");
  const colour = filled ? style(element).fill : style(element).stroke;
  const of = element.closest("[class]").outerHTML.slice(0, 120);
  marks.push({ contrast: contrast(colour, behind(element)), of });
}
const paper = luminance(style(document.body).backgroundColor);
const counted = { texts: texts.length, marks: marks.length };
const seen = { paper, ...counted, text: least(texts), mark: least(marks) };
const said = document.createElement("pre");
said.id = "seen";
said.textContent = JSON.stringify(seen);
document.body.append(said);
