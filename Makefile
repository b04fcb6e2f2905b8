# `make test` is what CI runs; `make check` is what a change must pass before review.
.PHONY: test bench check nats

nats:
	@bash deploy/get-nats.sh

test: nats
	PATH="$(CURDIR)/.tools/bin:$$PATH" cargo test --workspace --quiet --no-fail-fast

# One table; ARGS='--json' for JSON, ARGS='--only route' for a part (route, sessions, turns). On an idle machine, please.
bench: nats
	cargo build --release --quiet -p pinion
	PATH="$(CURDIR)/.tools/bin:$$PATH" cargo bench --quiet -p pinion-tests --bench pinion -- $(ARGS)

check:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	cargo test --quiet -p pinion-tests --test walls
