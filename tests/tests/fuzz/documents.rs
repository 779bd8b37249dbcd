//! What masters and commands read of a job: each document is read, or refused with an error.

use bytes::Bytes;
use elasticdl_cli::fuzzing;
use elasticdl_proto::FileList;

use crate::harness::Target;

#[test]
fn any_status_is_shown_or_refused() {
    Target { name: "status", inputs: 3000, head: usize::MAX }.run(fuzzing::status);
}

#[test]
fn any_summary_is_shown_or_refused() {
    Target { name: "summary", inputs: 3000, head: usize::MAX }.run(fuzzing::summary);
}

/// The corpus has lists before compression. Each input is unpacked as it is, and compressed.
#[test]
fn any_list_of_files_is_unpacked_or_refused() {
    let unpack = |packed: Vec<u8>| {
        let Ok(list) = FileList::unpack(Bytes::from(packed)) else { return false };
        assert_eq!(list.iter().count(), list.len());
        true
    };
    Target { name: "file_list", inputs: 3000, head: 24 }.run(|data| {
        let is_plain = unpack(data.to_vec());
        assert!(!is_plain || data.is_empty(), "an uncompressed list was accepted");
        unpack(zstd::encode_all(data, 0).unwrap())
    });
    let packed = FileList::pack((0..2000).map(|i| (format!("/data/part-{i:04}.csv"), 100 + i)));
    let target = Target { name: "packed_file_list", inputs: 2000, head: 40 };
    target.run_changed(&[packed.packed().to_vec()], |data| {
        let _ = unpack(data.to_vec());
    });
}
