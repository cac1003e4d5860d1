"""``docs/flags.md``, made from the settings' declarations: ``python3 -m openrlhf_gtpo.training.settings.page``."""

import re
import textwrap

from openrlhf_gtpo.algorithms import SURROGATES
from openrlhf_gtpo.training.settings.flags import setting_groups
from openrlhf_gtpo.training.settings.presets import PRESET, PRESETS
from openrlhf_gtpo.training.settings.setting import Setting

_INTRODUCTION = """# Flags

The flags that `openrlhf_gtpo.cli.train_ppo_ray` adds to OpenRLHF's command line, with their defaults. This page and
`--help` come from the same declarations: `python3 -m openrlhf_gtpo.training.settings.page > docs/flags.md`.

`--no-` before a switch's name turns it off. A run names on stderr each flag without effect, with the reason.
"""


def flags_page() -> str:
    """Return the page in Markdown."""
    parts = [_INTRODUCTION]
    for group in setting_groups():
        about = group.about + (f" ({_link(group.page)})" if group.page else "")
        parts.append(f"## {group.title}\n\n{_wrap(_marked(about))}\n")
        if group.settings:
            parts.append("".join(f"{_wrap(_item(setting), '  ')}\n" for setting in group.settings))
        if group is PRESET:
            names = [name for name in PRESETS if name not in SURROGATES] + ["cispo"]
            parts.append("Flags that each preset sets; the presets of the other surrogates are like cispo's:\n")
            parts.append("".join(f"{_wrap(_preset(name), '  ')}\n" for name in names))
    return "\n".join(parts)


def _item(setting: Setting) -> str:
    flag, default = setting.flag, setting.default
    if isinstance(default, bool):
        shown = f"--{'[no-]' if default else ''}{flag}"
    elif setting.choices:
        shown = f"--{flag} {'|'.join(setting.choices)}"
    elif default is None or default == []:
        shown = f"--{flag} {setting.metavar or flag.rpartition('.')[2].upper()}"
    else:
        shown = f"--{flag} {default}"
    notes = [f"`{default}` by default"] if setting.choices and default else []
    notes += [f"`{setting.bounds.of('x')}`"] if setting.bounds else []
    link = f" ({_link(setting.page)})" if setting.page else ""
    rules = f" ({', '.join(notes)})" if notes else ""
    return f"- **`{shown}`**{rules}: {_marked(setting.help)}{link}"


def _preset(name: str) -> str:
    flags = []
    for flag, value in PRESETS[name].items():
        values = value if isinstance(value, list) else [value]
        flags.append(f"`--{flag}`" if value is True else f"`--{flag} {' '.join(map(str, values))}`")
    return f"- **`--algo.preset {name}`**: {', '.join(flags)}"


def _link(page: str) -> str:
    return f"[{page.partition('#')[0]}]({page})"


def _marked(text: str) -> str:
    """Mark the flags in ``text`` as code."""
    return re.sub(r"(?<![\w`])--[a-z][\w.]*\w|\w+/\*", r"`\g<0>`", text)


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 119, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    print(flags_page(), end="")
