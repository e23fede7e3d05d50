"""Look of the demo: Gradio's theme with an accent colour of its own and the system's fonts, so nothing is downloaded.

The same colours are CSS variables in `assets/page.css`, for what Gradio's components do not draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

ASSETS = Path(__file__).with_name("assets")
SANS = (
    "ui-sans-serif",
    "system-ui",
    "-apple-system",
    "Segoe UI",
    "Roboto",
    "Noto Sans",
    "Liberation Sans",
    "sans-serif",
)
MONO = ("ui-monospace", "SFMono-Regular", "Consolas", "Noto Sans Mono", "Liberation Mono", "monospace")
LOOK: dict[str, str | tuple[str, str]] = {  # settings of the theme: a value, or one for light and one for dark
    "body_background_fill": ("*neutral_50", "*neutral_950"),
    "body_text_color": ("*neutral_900", "*neutral_100"),
    "body_text_color_subdued": ("*neutral_500", "#a3adb2"),
    "background_fill_primary": ("#ffffff", "*neutral_900"),
    "background_fill_secondary": ("*neutral_100", "*neutral_800"),
    "border_color_primary": ("*neutral_200", "*neutral_700"),
    "border_color_accent": ("*primary_600", "*primary_400"),
    "color_accent": "*primary_600",
    "color_accent_soft": ("*primary_50", "*primary_900"),
    "link_text_color": ("*primary_600", "*primary_300"),
    "block_background_fill": ("transparent", "transparent"),
    "block_border_width": ("0px", "0px"),
    "block_padding": "0px",
    "block_shadow": ("none", "none"),
    "block_label_background_fill": ("transparent", "transparent"),
    "block_label_border_width": ("0px", "0px"),
    "block_label_text_color": ("*body_text_color_subdued", "*body_text_color_subdued"),
    "block_title_background_fill": ("transparent", "transparent"),
    "block_title_text_color": ("*body_text_color_subdued", "*body_text_color_subdued"),
    "block_title_text_size": "*text_sm",
    "block_title_text_weight": "500",
    "block_title_padding": "0",
    "block_title_border_width": ("0px", "0px"),
    "input_background_fill": ("#ffffff", "*neutral_900"),
    "input_border_color": ("*neutral_300", "*neutral_600"),
    "input_border_color_focus": ("*primary_600", "*primary_400"),
    "input_border_width": "1px",
    "input_placeholder_color": ("*neutral_500", "#a3adb2"),
    "input_shadow": "none",
    "input_shadow_focus": "none",
    "input_radius": "8px",
    "checkbox_background_color_selected": ("*primary_600", "*primary_500"),
    "checkbox_border_color": ("*neutral_400", "*neutral_500"),
    "checkbox_border_color_selected": ("*primary_600", "*primary_500"),
    "checkbox_label_background_fill": ("#ffffff", "*neutral_900"),
    "checkbox_label_background_fill_hover": ("*neutral_100", "*neutral_800"),
    "checkbox_label_background_fill_selected": ("*primary_50", "*primary_900"),
    "checkbox_label_border_color": ("*neutral_300", "*neutral_600"),
    "checkbox_label_border_color_selected": ("*primary_600", "*primary_400"),
    "checkbox_label_border_width": "1px",
    "checkbox_label_text_color": "*body_text_color",
    "checkbox_label_text_color_selected": ("*primary_800", "*primary_100"),
    "slider_color": ("*primary_600", "*primary_400"),
    "loader_color": ("*primary_600", "*primary_400"),
    "button_primary_background_fill": ("*primary_600", "*primary_300"),
    "button_primary_background_fill_hover": ("*primary_700", "*primary_200"),
    "button_primary_text_color": ("#ffffff", "*primary_950"),
    "button_primary_border_color": ("transparent", "transparent"),
    "button_secondary_background_fill": ("#ffffff", "*neutral_900"),
    "button_secondary_background_fill_hover": ("*neutral_100", "*neutral_800"),
    "button_secondary_border_color": ("*neutral_300", "*neutral_600"),
    "button_secondary_text_color": ("*neutral_800", "*neutral_100"),
    "button_border_width": "1px",
    "button_large_radius": "8px",
    "button_large_text_size": "*text_md",
    "button_large_text_weight": "600",
    "button_large_padding": "9px 18px",
    "button_small_radius": "8px",
    "button_small_text_size": "*text_sm",
    "button_small_text_weight": "500",
    "table_border_color": ("*neutral_200", "*neutral_700"),
    "table_even_background_fill": ("transparent", "transparent"),
    "table_odd_background_fill": ("transparent", "transparent"),
    "error_text_color": ("#a3231f", "#ffb3ad"),
}


def theme() -> Any:
    """The theme in light and dark; each text on its background has a contrast of 4.5 or more (WCAG 2.2, 1.4.3)."""
    import gradio as gr

    petrol = gr.themes.Color(
        *("#eef7f8", "#d5eaed", "#add6db", "#7fbfc8", "#4aa3b0", "#2a8896", "#12697a", "#0f5866", "#0d4753", "#0b3a44"),
        "#062329",
        name="petrol",
    )
    slate = gr.themes.Color(
        *("#f7f8f8", "#eef0f1", "#dde1e3", "#c3cacd", "#8d979c", "#66727a", "#515c63", "#3a444a", "#252d32", "#181e22"),
        "#101518",
        name="slate",
    )
    base = gr.themes.Base(
        primary_hue=petrol,
        secondary_hue=petrol,
        neutral_hue=slate,
        font=[gr.themes.Font(name) for name in SANS],
        font_mono=[gr.themes.Font(name) for name in MONO],
        text_size=gr.themes.sizes.text_md,
        spacing_size=gr.themes.sizes.spacing_md,
        radius_size=gr.themes.sizes.radius_md,
    )
    values: dict[str, str] = {}
    for name, value in LOOK.items():
        values |= {name: value} if isinstance(value, str) else dict(zip((name, f"{name}_dark"), value))
    return base.set(**values)
