"""Colours of one figure can be told apart by people who see no red or no green, on a light and on a dark page.

A colour is simulated as an eye without one kind of cone sees it, and compared with the others of its legend by
CIEDE2000. One unit of it is about the smallest difference that is seen between two large patches that touch. Parts of a
bar are small, stand apart from their names in the legend, and are shown by projectors; so ten units are asked for.
"""

from __future__ import annotations

import itertools
import math

import pytest

from fsdplab.figures import style
from fsdplab.figures.plots import allocator, linked, memory, plans, step_causes, timeline

pytestmark = pytest.mark.quick

LEAST = 10
# Predicted bars are paler. Each stands below its measured one, with the same parts in the same order.
LEAST_OF_PALE = 8
# A bar has an edge and stands on white or on the dark page: what has no such edge in the dark must be lighter than it.
LEAST_ON_PAGE = 5

# Linear RGB as people without one kind of cone see it (Machado, Oliveira and Fernandes 2009, severity 1).
EYES = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
PAGES = {"light": "#ffffff", "dark": "#12151a"}  # --paper of figures/report/templates/page.css

Lab = tuple[float, float, float]
Palette = dict[str, str]


def channels(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def seen(colour: str, eye) -> Lab:
    """CIE Lab of a colour as an eye sees it."""
    shares = [channel / 255 for channel in channels(colour)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    r, g, b = (min(1, max(0, sum(a * c for a, c in zip(row, linear)))) for row in eye)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def ciede2000(one: Lab, other: Lab) -> float:
    """The difference of two colours by Luo, Cui and Rigg 2001, in the notation of Sharma, Wu and Dalal 2005."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean_c = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 0.5 * (1 - math.sqrt(mean_c**7 / (mean_c**7 + 25**7)))
    a1, a2 = a1 * (1 + g), a2 * (1 + g)
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = math.degrees(math.atan2(b1, a1)) % 360, math.degrees(math.atan2(b2, a2)) % 360
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    difference_l, difference_c = l2 - l1, c2 - c1
    difference_h = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2))
    lightness, c = (l1 + l2) / 2, (c1 + c2) / 2
    h = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    t = (
        1
        - 0.17 * math.cos(math.radians(h - 30))
        + 0.24 * math.cos(math.radians(2 * h))
        + 0.32 * math.cos(math.radians(3 * h + 6))
        - 0.20 * math.cos(math.radians(4 * h - 63))
    )
    in_l = difference_l / (1 + 0.015 * (lightness - 50) ** 2 / math.sqrt(20 + (lightness - 50) ** 2))
    in_c = difference_c / (1 + 0.045 * c)
    in_h = difference_h / (1 + 0.015 * c * t)
    rotation = math.sin(math.radians(60 * math.exp(-(((h - 275) / 25) ** 2)))) * 2 * math.sqrt(c**7 / (c**7 + 25**7))
    return math.sqrt(in_l**2 + in_c**2 + in_h**2 - rotation * in_c * in_h)


def alike(palette: Palette, eye, least: float) -> list[str]:
    """The pairs that are nearer than `least`, with their difference."""
    found = []
    for (name, colour), (other_name, other) in itertools.combinations(palette.items(), 2):
        difference = ciede2000(seen(colour, eye), seen(other, eye))
        if difference < least:
            found.append(f"{name} ({colour}) and {other_name} ({other}): {difference:.1f}")
    return found


def over(colour: str, opacity: float, page: str) -> str:
    """A colour through which the page is seen: `over("#000000", 0.5, "#ffffff") == "#808080"`."""
    mixed = [round(opacity * c + (1 - opacity) * p) for c, p in zip(channels(colour), channels(page))]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def named(prefix: str, colours) -> Palette:
    return {f"{prefix} {place}": colour for place, colour in enumerate(colours)}


# what stands in one legend
PALETTES: dict[str, Palette] = {
    "categories of memory": style.CATEGORY_COLOURS,
    "strategies": style.STRATEGY_COLOURS,
    "collectives": style.COLLECTIVE_COLOURS | {"others": "#808488"},
    "timeline": timeline.COLOURS,
    "parts of a step": style.STEP_COLOURS,
    "parts of exposed time": style.EXPOSED_COLOURS,
    "phases": style.PHASE_COLOURS,
    "a step by cause": {
        "computing": style.STEP_COLOURS["compute only"],
        "hidden": style.STEP_COLOURS["overlapped"],
        "loading": step_causes.LOADING_COLOUR,
        **style.EXPOSED_COLOURS,
        **named("idle", step_causes.IDLE_COLOURS),
    },
    "the allocator": named("category", allocator.CATEGORY_COLOURS) | allocator.COLOURS,
    "plans": named("plan", plans.PLAN_COLOURS),
    "roofline": {
        "forward": style.COLLECTIVE_COLOURS["all_gather"],
        "backward": style.COLLECTIVE_COLOURS["all_gather in backward"],
        "a run": style.ALARM,
    },
    "units": {
        "own shard": style.CATEGORY_COLOURS["sharded_parameters"],
        "unsharding": linked.STATE_COLOURS["unsharding"],
        "unsharded": linked.STATE_COLOURS["unsharded"],
    },
}


@pytest.mark.parametrize("eye", EYES.values(), ids=EYES)
@pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES)
def test_colours_of_one_legend_are_told_apart_by_every_eye(palette: Palette, eye):
    assert alike(palette, eye, LEAST) == []


@pytest.mark.parametrize("eye", EYES.values(), ids=EYES)
@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_what_the_page_shines_through_is_told_apart_on_a_light_and_a_dark_page(page: str, eye):
    pale = {name: over(colour, memory.PALE, page) for name, colour in style.CATEGORY_COLOURS.items()}
    assert alike(pale, eye, LEAST_OF_PALE) == []
    # a unit that is sharded shows the page
    assert alike(PALETTES["units"] | {"sharded": page}, eye, LEAST) == []


@pytest.mark.parametrize("eye", EYES.values(), ids=EYES)
@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES)
def test_every_colour_is_seen_on_a_light_and_a_dark_page(palette: Palette, page: str, eye):
    lost = [pair for pair in alike(palette | {"the page": page}, eye, LEAST_ON_PAGE) if "the page" in pair]
    assert lost == []


def test_the_simulation_and_the_difference_are_the_published_ones():
    pairs = {  # of the table of Sharma, Wu and Dalal 2005
        ((50, 2.6772, -79.7751), (50, 0, -82.7485)): 2.0425,
        ((50, 2.5, 0), (73, 25, -18)): 27.1492,
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514)): 0.9082,
        ((50, -1, 2), (50, 0, 0)): 2.3669,
    }
    assert {pair: round(ciede2000(*pair), 4) for pair in pairs} == pairs
    red, green = {"red": "#c05050"}, {"green": "#808040"}
    assert alike(red | green, EYES["usual"], LEAST) == []
    assert len(alike(red | green, EYES["deuteranopia"], LEAST)) == 1
