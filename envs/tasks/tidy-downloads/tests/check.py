"""Compares the folders, their names and contents with what remains of environment/downloads."""

from pathlib import Path

DOWNLOADS = Path("/app/downloads")
EXPECTED = {
    "images": {
        "beach (copy).jpeg": "jpeg beach\n",
        "funny.gif": "gif cat\n",
        "logo.png": "png logo\n",
    },
    "documents": {
        "-dash.txt": "dash\n",
        "Notes (1).txt": "buy milk\n",
        "Scan 2025-03-01.PDF": "%PDF invoice 1\n",
        "invoice.pdf": "%PDF invoice 2\n",
        "todo.md": "- write\n",
        "weird.name.with.dots.Txt": "dots\n",
    },
    "archives": {
        "old.tar": "tar old\n",
        "photos.zip": "zip photos\n",
        "site-backup.tar.gz": "gzip tar\n",
    },
    "other": {
        "README": "read me\n",
        "data.csv": "a,b\n1,2\n",
        "empty": "",
        "setup.sh": "#!/bin/sh\necho hi\n",
    },
}

assert sorted(entry.name for entry in DOWNLOADS.iterdir()) == sorted(EXPECTED), "something else lies in downloads"
for folder, files in EXPECTED.items():
    found = {path.name: path.read_text() for path in (DOWNLOADS / folder).iterdir()}
    assert found == files, f"{folder} holds {sorted(found)}, not {sorted(files)}, or other contents"
print("downloads is tidy")
