"""The files of a workspace as JupyterLab lists them: in the order of the course."""

from __future__ import annotations

import datetime
from typing import Any

from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

from ..course import curriculum


class CourseOrder(AsyncLargeFileManager):
    """Lists the files of the course as if they had been made a second apart: the notebooks, then their .py.

    JupyterLab sorts files by name or by a date, and knows no other order.
    """

    async def get(
        self,
        path: str,
        content: bool = True,
        type: str | None = None,
        format: str | None = None,
        require_hash: Any = False,
    ) -> Any:
        model = await super().get(path, content, type, format, require_hash)
        if model["type"] == "directory":
            order = [f"{book.name}.{kind}" for kind in ("ipynb", "py") for book in curriculum.notebooks()]
            course = [each for each in model["content"] or [] if each["name"] in order]
            first = min((each["created"] for each in course), default=datetime.datetime.min)
            for each in course:
                each["created"] = first + datetime.timedelta(seconds=order.index(each["name"]))
        return model
