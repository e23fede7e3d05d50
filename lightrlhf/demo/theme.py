"""Look of the demo: Gradio's base theme in our colours and the system's fonts, so nothing is downloaded.

The same colours are CSS variables in `assets/page.css`, for what Gradio's components do not draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

ASSETS = Path(__file__).with_name("assets")
SANS = "ui-sans-serif, system-ui, -apple-system, Segoe UI, Roboto, Noto Sans, Liberation Sans, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Consolas, Noto Sans Mono, Liberation Mono, monospace"
PETROL = "#eef7f8 #d5eaed #add6db #7fbfc8 #4aa3b0 #2a8896 #12697a #0f5866 #0d4753 #0b3a44 #062329"
SLATE = "#f7f8f8 #eef0f1 #dde1e3 #c3cacd #8d979c #66727a #515c63 #3a444a #252d32 #181e22 #101518"
LOOK = {  # names of the theme's settings by their values in light and in dark
    ("*neutral_50", "*neutral_950"): "body_background_fill",
    ("*neutral_900", "*neutral_100"): "body_text_color",
    ("*neutral_500", "#a3adb2"): "body_text_color_subdued input_placeholder_color",
    ("*body_text_color_subdued",) * 2: "block_label_text_color block_title_text_color",
    ("#ffffff", "*neutral_900"): "background_fill_primary input_background_fill checkbox_label_background_fill "
    "button_secondary_background_fill",
    ("*neutral_100", "*neutral_800"): "background_fill_secondary checkbox_label_background_fill_hover "
    "button_secondary_background_fill_hover",
    ("*primary_600", "*primary_400"): "border_color_accent input_border_color_focus slider_color loader_color "
    "checkbox_label_border_color_selected color_accent",
    ("*primary_600", "*primary_500"): "checkbox_background_color_selected checkbox_border_color_selected",
    ("*primary_600", "*primary_300"): "link_text_color button_primary_background_fill",
    ("*primary_700", "*primary_200"): "button_primary_background_fill_hover",
    ("*primary_50", "*primary_900"): "color_accent_soft checkbox_label_background_fill_selected",
    ("*primary_800", "*primary_100"): "checkbox_label_text_color_selected",
    ("*neutral_200", "*neutral_700"): "table_border_color",
    ("*neutral_300", "*neutral_600"): "input_border_color checkbox_label_border_color button_secondary_border_color",
    ("*neutral_400", "*neutral_500"): "checkbox_border_color",
    ("*neutral_800", "*neutral_100"): "button_secondary_text_color",
    ("#ffffff", "*primary_950"): "button_primary_text_color",
    ("#a3231f", "#ffb3ad"): "error_text_color",
    ("transparent",) * 2: "block_background_fill block_label_background_fill block_title_background_fill "
    "button_primary_border_color table_even_background_fill table_odd_background_fill",
    ("none",) * 2: "block_shadow input_shadow_focus",
    ("0px",) * 2: "block_border_width block_label_border_width block_title_border_width block_padding",
    ("1px",) * 2: "input_border_width checkbox_label_border_width button_border_width",
    ("8px",) * 2: "input_radius button_large_radius button_small_radius",
    ("9px 18px",) * 2: "button_large_padding",
    ("500",) * 2: "block_title_text_weight button_small_text_weight",
    ("*text_sm",) * 2: "block_title_text_size",
    ("*text_md",) * 2: "button_large_text_size",
}


def make_theme() -> Any:
    """The theme in light and dark; the contrast of text is 4.5 or more (WCAG 2.2, 1.4.3)."""
    from gradio import themes

    petrol, slate = (themes.Color(*colours.split()) for colours in (PETROL, SLATE))
    sans, mono = ([themes.Font(name) for name in names.split(", ")] for names in (SANS, MONO))
    base = themes.Base(primary_hue=petrol, secondary_hue=petrol, neutral_hue=slate, font=sans, font_mono=mono)
    values = [(name, *pair) for pair, names in LOOK.items() for name in names.split()]
    settings = {name: light for name, light, _ in values} | {f"{name}_dark": dark for name, _, dark in values}
    return base.set(**{name: value for name, value in settings.items() if hasattr(base, name)})
