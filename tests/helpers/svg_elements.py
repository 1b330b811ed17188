"""What stands in a picture, read back from it."""

from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def marked(text: str, name: str) -> list[ElementTree.Element]:
    """Elements of a class."""
    return [element for element in ElementTree.fromstring(text).iter() if element.get("class") == name]


def written(text: str, name: str) -> list[str]:
    """The words of those of a class."""
    return [element.text or "" for element in marked(text, name)]
