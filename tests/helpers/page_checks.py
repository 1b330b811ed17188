"""Faults of a page in a browser: JavaScript expressions, each of which returns a list that should be empty."""

FIND_LOW_CONTRAST_TEXT = """[...document.querySelectorAll('body *')].filter(element => element.checkVisibility() &&
  [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()) &&
  !element.closest('script, style, .bartext, .heatmap-label')).map(element => {
  const light = (color) => { const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const paperOf = (node) => { const paint = getComputedStyle(node).backgroundColor;
    return paint === 'rgba(0, 0, 0, 0)' && node.parentElement ? paperOf(node.parentElement) : paint; };
  const style = getComputedStyle(element), text = light(element.closest('svg') ? style.fill : style.color);
  const paper = light(element.closest('svg') ? getComputedStyle(document.body).backgroundColor : paperOf(element));
  const contrast = (Math.max(text, paper) + 0.05) / (Math.min(text, paper) + 0.05);
  return [contrast, element.textContent];
}).filter(([contrast]) => !(contrast >= 4.5))"""
"""Texts whose contrast is below WCAG's AA. Excludes texts on bars and cells of plotly,
which chooses their color by that of the bar."""
FIND_OVERFLOWING_ELEMENTS = """[...document.querySelectorAll('main *')].filter(one => {
  const figure = one.closest('.main-svg');
  if ((figure && !one.matches('.annotation-text')) || one.closest('.scroll table')) return false;
  return one.getBoundingClientRect().right > (figure ?? document.body).getBoundingClientRect().right + 1;
}).map(one => one.outerHTML)"""
"""Elements that exceed the right edge of the page, and titles that exceed that of their figure. Tables may scroll."""
