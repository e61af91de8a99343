"""What Streamlit runs: the pages, and where run folders are (`forge dashboard` tells in the environment)."""

from __future__ import annotations

import streamlit as st
from PIL import Image

from dashboards import page_run, page_trace, page_trajectory, page_tune, page_whatif
from forge.report.drawing import BLUE

#: an icon by name would be fetched from the network
ICON = Image.new("RGB", (16, 16), BLUE)

st.set_page_config(page_title="Forge", page_icon=ICON, layout="wide")
PAGES = [
    st.Page(page_whatif.page, title="What-if", url_path="what-if", icon=":material/compare_arrows:", default=True),
    st.Page(page_run.page, title="Run", url_path="run", icon=":material/timeline:"),
    st.Page(page_trajectory.page, title="Trajectory", url_path="trajectory", icon=":material/account_tree:"),
    st.Page(page_trace.page, title="Trace", url_path="trace", icon=":material/route:"),
    st.Page(page_tune.page, title="Tune", url_path="tune", icon=":material/tune:"),
]
st.navigation(PAGES).run()
