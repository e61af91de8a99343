"""The dashboard, `forge dashboard`: pages that read run folders and ask the simulator.

`records` folds traces, `whatif`, `serving` and `jobs` compute, `controls` says what may be changed, `frames` what is
drawn: plain functions, without Streamlit. `charts` draws, `app.py` and the `page_*` modules are what Streamlit runs.
"""
