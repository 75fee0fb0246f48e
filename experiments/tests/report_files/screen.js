// Appended to a copy of a page: says what of it is on the first screen.
const bottom = (element) => element.getBoundingClientRect().bottom;
const figure = document.querySelector("figure");
const said = document.createElement("pre");
said.id = "seen";
said.textContent = JSON.stringify({
  height: window.innerHeight,
  cause: bottom(figure.querySelector("h2")),
  picture: bottom(figure.querySelector("svg.plot")),
  bars: figure.querySelectorAll("svg.plot .bar").length,
  sideways: document.documentElement.scrollWidth - window.innerWidth,
});
document.body.append(said);
