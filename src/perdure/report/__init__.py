"""Tables, figures and the HTML report of finished runs.

Example:
    >>> from perdure.report import figures, write_page
    >>> from perdure.report.records import read_runs
    >>> runs = read_runs(["runs/first", "runs/second"])  # doctest: +SKIP
    >>> write_page(runs, "report.html")  # doctest: +SKIP
    >>> drawings = figures(runs, "figures", formats=("png", "svg"))  # doctest: +SKIP

"""

from perdure.report.matplotlib_charts import figures
from perdure.report.page import page, write_page
from perdure.report.records import RunRecord, Runs

__all__ = ["RunRecord", "Runs", "figures", "page", "write_page"]
