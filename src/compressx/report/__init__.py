"""How the record of a run is rendered: report.md, report.html, figures, comparisons."""
