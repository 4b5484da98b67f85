"""What finished runs say, for people: tables, figures and the page.

from perdure.report import figures, read_runs, write_page

runs = read_runs(["runs/first", "runs/second"])
write_page(runs, "report.html")
figures(runs, "figures", formats=("png", "svg"))
"""

from perdure.report.matplotlib_charts import figures
from perdure.report.page import page, write_page
from perdure.report.run_records import RunRecord, Runs, read_runs

__all__ = ["RunRecord", "Runs", "figures", "page", "read_runs", "write_page"]
