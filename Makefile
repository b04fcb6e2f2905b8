# `make test` is what CI runs; `make check` is what a change must pass before review.
.PHONY: demo test faults bench fuzz check nats model

nats:
	@bash deploy/get-nats.sh

# A real model's file, of which the tests read vocabulary and chat template.
model:
	@bash deploy/get-model.sh

# Builds, talks with a real model and kills its decode worker, replays 40 real coding-agent sessions, says what came of it, and
# takes everything down again.
demo: nats model
	cargo build --release -p pinion
	bash deploy/demo.sh

test: nats model
	PATH="$(CURDIR)/.tools/bin:$$PATH" cargo test --workspace --quiet --no-fail-fast

# Kills real processes, REPS times each (10), and prints a table. A quarter of an hour.
faults: nats
	cargo build --release --quiet -p pinion
	PATH="$(CURDIR)/.tools/bin:$$PATH" PINION_FAULT_REPS=$(or $(REPS),10) \
		cargo test --release --quiet -p pinion-tests --test faults -- --ignored --nocapture table

# One table; ARGS='--json' for JSON, ARGS='--only route' for a part (route, sessions, turns). On an idle machine, please.
bench: nats
	cargo build --release --quiet -p pinion
	PATH="$(CURDIR)/.tools/bin:$$PATH" cargo bench --quiet -p pinion-tests --bench pinion -- $(ARGS)

# Each decoder of foreign bytes for SECONDS (60). Needs `cargo install cargo-fuzz` and a nightly toolchain.
fuzz:
	cd tests/fuzz && for target in $$(cargo fuzz list); do \
		cargo +nightly fuzz run $$target -- -max_total_time=$(or $(SECONDS),60) -max_len=100000 -rss_limit_mb=4096 || exit 1; done

check:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --workspace --no-deps --quiet
	cargo test --quiet -p pinion-tests --test walls --test dependencies --test docs
