# `make test` is what CI runs; `make check` is what a change must pass before review.
.PHONY: test check nats

nats:
	@bash deploy/get-nats.sh

test: nats
	PATH="$(CURDIR)/.tools/bin:$$PATH" cargo test --workspace --quiet --no-fail-fast

check:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	cargo test --quiet -p pinion-tests --test walls
