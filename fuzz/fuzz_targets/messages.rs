//! Requests to elfend, and the environment variable of a batch.
#![no_main]

use elfen_machine::fence::status::Request;
use elfen_rt::inherit::Inherited;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some(inherited) = Inherited::parse(bytes) {
        assert_eq!(Inherited::parse(inherited.to_string().as_bytes()), Some(inherited));
    }
    let Ok(request) = serde_json::from_slice::<Request>(bytes) else { return };
    if let Request::Set { wanted, .. } = &request {
        let _settings = wanted.settings();
    }
    let again: Request = serde_json::from_slice(&serde_json::to_vec(&request).unwrap()).unwrap();
    assert_eq!(again, request);
});
