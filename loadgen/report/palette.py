"""Colours of all pictures. They are roles: in a page each becomes a CSS variable, so that pictures follow a dark
background as text does.
"""

INK, MUTED, GRID, SURFACE = "#1f2428", "#69727d", "#dfe3e8", "#fefefe"
BLUE, ORANGE, TEAL, RED, GREY, VIOLET = "#2b6cb0", "#d0782a", "#2a8a7e", "#c0392f", "#a3abb5", "#8a63b3"
SHADE = "#f1f3f6"
ROLES = {
    INK: "ink", MUTED: "muted", GRID: "grid", SURFACE: "surface", SHADE: "shade",
    BLUE: "blue", ORANGE: "orange", TEAL: "teal", RED: "red", GREY: "grey", VIOLET: "violet",
}  # fmt: skip
"""Colour to the name of its CSS variable, which templates/report.css defines for light and dark."""
