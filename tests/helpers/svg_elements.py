"""Elements and texts of an SVG picture."""

from xml.etree import ElementTree

SVG_NAMESPACE = "{http://www.w3.org/2000/svg}"


def elements_of_class(text: str, name: str) -> list[ElementTree.Element]:
    """Return the elements of a class."""
    return [element for element in ElementTree.fromstring(text).iter() if element.get("class") == name]


def texts_of_class(text: str, name: str) -> list[str]:
    """Return the texts of the elements of a class."""
    return [element.text or "" for element in elements_of_class(text, name)]
