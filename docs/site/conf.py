"""Sphinx's settings. `build.py` writes the pages and starts Sphinx."""

project = "gptjax"
copyright = "The gptjax authors"
extensions = ["myst_nb"]
root_doc = "index"
smartquotes = False
html_theme = "furo"
html_title = "gptjax"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
highlight_language = "text"
python_maximum_signature_line_length = 70
toc_object_entries = False

nb_execution_raise_on_error = True
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 120
nb_merge_streams = True
