"""How the tables of one release become those of the next: Alembic's scripts, one for each revision, as modules of this
package.

A revision is named by its number. Nothing here is imported to serve: `coordinator upgrade` runs it
(coordinator/lorica_coordinator/edges/upkeep/upgrade.py).
"""
