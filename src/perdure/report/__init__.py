"""Read finished runs, and write their tables, figures and HTML report.

Example:
    >>> from perdure.report import figures, read_runs, write_page
    >>> runs = read_runs(["runs/first", "runs/second"])  # doctest: +SKIP
    >>> write_page(runs, "report.html")  # doctest: +SKIP
    >>> drawings = figures(runs, "figures", formats=("png", "svg"))  # doctest: +SKIP
"""

from perdure.report.matplotlib_charts import figures
from perdure.report.page import page, write_page
from perdure.report.run_records import RunRecord, Runs, read_runs

__all__ = ["RunRecord", "Runs", "figures", "page", "read_runs", "write_page"]
