"""Data of tables and figures next to their images, for clients that draw them again.

    e2b/data           a pandas DataFrame: a list for each column
    e2b/chart          a matplotlib figure: its axes, and the points of each line, bar, slice or box
    application/json   a dict or a list

A kernel runs this once, for the SDK of E2B. Without the package e2b-charts there are no charts.
"""

# IPython is typed only in part.
# mypy: disable-error-code="no-untyped-call,misc"

import json
from collections.abc import Callable
from typing import Any

from IPython import get_ipython
from IPython.core.formatters import JSONFormatter
from traitlets import ObjectName

_CELLS_MAX = 100_000  # of a table


class _Data(JSONFormatter):
    """Formats values of the types that are registered with it, and no others."""

    print_method = ObjectName("_repr_sbx_data_")

    def pop(self, typ: Any, default: Any = None) -> Any:
        """Keep the type: the backend of matplotlib takes its figures out of all formatters."""
        return default


def install() -> None:
    formatters = get_ipython().display_formatter.formatters
    kinds: tuple[tuple[str, str, str, Callable[[Any], Any]], ...] = (
        ("e2b/data", "pandas", "DataFrame", _table),  # of pandas 3
        ("e2b/data", "pandas.core.frame", "DataFrame", _table),
        ("e2b/chart", "matplotlib.figure", "Figure", _chart),
    )
    for mime, module, name, function in kinds:
        if mime not in formatters:
            formatters[mime] = _Data(parent=get_ipython(), format_type=mime)
        formatters[mime].for_type_by_name(module, name, function)
    plain: JSONFormatter = formatters["application/json"]
    plain.for_type(dict, _json)
    plain.for_type(list, _json)


def _table(table: Any) -> dict[str, Any] | None:
    if table.size > _CELLS_MAX:
        return None
    split = json.loads(table.to_json(orient="split", date_format="iso"))
    names = map(str, split["columns"])
    return {name: [row[at] for row in split["data"]] for at, name in enumerate(names)}


def _chart(figure: Any) -> dict[str, Any] | None:
    try:
        from e2b_charts import chart_figure_to_dict

        chart: dict[str, Any] | None = _json(chart_figure_to_dict(figure))
        return chart
    except Exception:  # noqa: BLE001  # a chart without data is still an image
        return None


def _json(value: Any) -> Any:
    """Return a value as JSON has it, NaN and infinities as null; None for one that JSON does not
    have."""
    try:
        return json.loads(json.dumps(value), parse_constant=lambda _: None)
    except (TypeError, ValueError, RecursionError):
        return None


install()
