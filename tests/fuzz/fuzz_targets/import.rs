#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pinion_tests::decoders::feed("import", bytes));
