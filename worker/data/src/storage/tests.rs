use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use object_store::path::Path;
use rustix::io::Errno;

use super::*;

fn folder() -> (tempfile::TempDir, Storage) {
    let folder = tempfile::tempdir().unwrap();
    let storage = Storage::open(folder.path().join("a b/c%d").to_str().unwrap()).unwrap();
    (folder, storage)
}

#[test]
fn written_files_can_be_read_listed_and_removed() {
    let (folder, storage) = folder();
    assert_eq!(storage.list("").unwrap(), []);
    storage.write("x/1", vec![Bytes::from_static(b"abc"), Bytes::from_static(b"de")]).unwrap();
    storage.join("x").write("0", vec![Bytes::from_static(b"f")]).unwrap();
    let at = folder.path().join("a b/c%d/x/1");
    assert_eq!(std::fs::read(at).unwrap(), b"abcde", "the path is used as it is");
    assert_eq!(storage.read("x/1").unwrap(), "abcde");
    assert_eq!(
        (storage.read_range("x/1", 1..3).unwrap(), storage.bytes("x/1").unwrap()),
        ("bc".into(), 5)
    );
    let found = |path: &str, bytes| Found { path: path.into(), bytes };
    assert_eq!(storage.list("").unwrap(), [found("x/0", 1), found("x/1", 5)]);
    assert_eq!(storage.list("x").unwrap(), [found("0", 1), found("1", 5)]);
    storage.remove("x/1").unwrap();
    storage.remove("x/1").unwrap();
    let error = storage.read("x/1").unwrap_err();
    assert!(
        matches!(&error, StorageError::NotFound { path } if path.ends_with("c%d/x/1")),
        "{error}"
    );
    let error = storage.write("x", vec![Bytes::from_static(b"1")]).unwrap_err().to_string();
    assert!(error.ends_with("c%d/x: there is a folder with this name"), "{error}");
    storage.write("file", vec![Bytes::from_static(b"1")]).unwrap();
    let error = storage.read("file/below").unwrap_err();
    assert!(matches!(&error, StorageError::NotFound { .. }), "{error}");
}

#[test]
fn a_large_file_is_written_completely_to_folders_and_stores() {
    let (_folder, here) = folder();
    let memory = object_store::memory::InMemory::new();
    for storage in [here, Storage::within(Arc::new(memory), Path::default(), "memory")] {
        let bytes: Vec<u8> = (0..(32 << 20) + 7).map(|i| (i % 251) as u8).collect();
        let parts =
            vec![Bytes::copy_from_slice(&bytes[..100]), Bytes::copy_from_slice(&bytes[100..])];
        storage.write("large", parts).unwrap();
        assert!(storage.read("large").unwrap() == bytes);
        assert_eq!(storage.list("").unwrap().len(), 1);
    }
}

#[test]
fn only_folders_with_the_prefix_are_listed() {
    let (_folder, here) = folder();
    let memory = object_store::memory::InMemory::new();
    for storage in [here, Storage::within(Arc::new(memory), Path::from("a"), "memory")] {
        assert_eq!(storage.list_folders("step-").unwrap(), []);
        for path in ["step-1/a", "step-2/b/c", "other/a", "step", "steq/a", "a", "z"] {
            storage.write(path, vec![Bytes::from_static(b"1")]).unwrap();
        }
        let found = storage.list_folders("step-").unwrap();
        let names: Vec<_> = found.iter().map(|found| found.path.as_str()).collect();
        assert_eq!(names, ["step-1/a", "step-2/b/c"]);
    }
}

#[test]
fn concurrent_writers_of_one_file_leave_one_complete_version() {
    let (_folder, storage) = folder();
    std::thread::scope(|scope| {
        for byte in 0..4 {
            let storage = &storage;
            scope.spawn(move || {
                for _ in 0..20 {
                    storage.write("same", vec![Bytes::from(vec![byte; 1 << 16])]).unwrap();
                }
            });
        }
    });
    let bytes = storage.read("same").unwrap();
    assert!(bytes.len() == 1 << 16 && bytes.iter().all(|byte| *byte == bytes[0]));
}

#[test]
fn a_job_that_stops_does_not_repeat_reads_of_what_it_writes() {
    let (_folder, storage) = folder();
    retry::set_stop_flag(Arc::new(AtomicBool::new(true)));
    let read = |storage: &Storage| {
        let mut attempts = 0;
        let read = storage.access("x", || {
            attempts += 1;
            if attempts < 2 { Err(io::Error::from(Errno::STALE)) } else { Ok(()) }
        });
        (read.is_ok(), attempts)
    };
    assert_eq!(read(&storage.clone().of_outputs().join("y")), (false, 1));
    assert_eq!(read(&storage), (true, 2));
}

#[test]
fn a_file_url_is_a_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    Storage::open(path).unwrap().write("a", vec![Bytes::from_static(b"1")]).unwrap();
    assert_eq!(Storage::open(&format!("file://{path}/")).unwrap().read("a").unwrap(), "1");
}

#[test]
fn an_invalid_address_is_refused_and_named() {
    for address in ["", "ftp://host/x", "memory:///", "s3://", "http://host/x"] {
        let error = Storage::open(address).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{address}: ")), "{error}");
    }
    for address in ["s3://bucket/a/b", "gs://bucket/a"] {
        assert_eq!(Storage::open(address).unwrap().address(), address);
    }
}

/// Names that are hard to get right.
const NAMES: [&str; 22] = [
    "a b",
    " a",
    "a ",
    "a#b",
    "a#1",
    "?a",
    "a%20b",
    "100%",
    "ü",
    "e\u{301}",
    "😀",
    "\"q\"",
    "it's",
    "[1]",
    "{x}",
    "a\\b",
    "^`",
    "~a",
    "*",
    "a&b=c+d;e",
    "<t>",
    "a|b",
];

#[test]
fn files_of_any_name_are_written_listed_read_and_removed() {
    let (folder, here) = folder();
    let memory = object_store::memory::InMemory::new();
    let long = "x".repeat(255);
    let names = NAMES.iter().copied().chain([&*long, ".#x", "..a", "a\nb"]);
    for storage in [here, Storage::within(Arc::new(memory), Path::default(), "memory")] {
        let is_local = matches!(storage.place, Place::Local(_));
        // Keys have no control characters.
        let names: Vec<_> = names.clone().filter(|n| is_local || !n.contains('\n')).collect();
        for name in &names {
            // As a file, and as a folder.
            storage.write(name, vec![Bytes::copy_from_slice(name.as_bytes())]).unwrap();
            let folder = if name.len() < 200 { name } else { "long" };
            storage.join(&format!("in {folder}")).write("f", vec![]).unwrap();
        }
        let mut found: Vec<_> = storage.list("").unwrap().into_iter().map(|f| f.path).collect();
        found.retain(|path| !path.ends_with("/f"));
        let mut expected = names.clone();
        expected.sort_unstable();
        assert_eq!(found, expected);
        for name in &names {
            assert_eq!(storage.read(name).unwrap(), *name);
            storage.remove(name).unwrap();
            assert!(matches!(storage.read(name), Err(StorageError::NotFound { .. })), "{name}");
        }
    }
    // The names are used as they are.
    let at = |name: &str| folder.path().join("a b/c%d").join(name);
    assert!(at("in a#b/f").is_file() && at("in a%20b/f").is_file());
}

#[test]
fn an_address_is_a_bucket_and_a_key_and_no_url() {
    for name in NAMES {
        let key = format!("größe {name}/ck#1?x=%41");
        let opened = Storage::open(&format!("s3://bucket/{key}")).unwrap();
        let Place::Store(objects) = &opened.place else { panic!("{name}") };
        assert_eq!(objects.key.as_ref(), key);
        let path = format!("/tmp/{key}");
        for address in [format!("file://{path}"), path.clone()] {
            let Place::Local(found) = Storage::open(&address).unwrap().place else {
                panic!("{address}")
            };
            assert_eq!(found, PathBuf::from(&path));
        }
    }
    for address in ["s3://b/a//b", "s3://b//a", "s3://b/./x", "s3://b/a/../b", "s3://b/a\nb"] {
        let error = Storage::open(address).unwrap_err().to_string();
        assert!(error.contains("is not a key that can be used"), "{error}");
    }
    for address in ["s3://bu#cket/a", "s3://b?x/a", "gs://%41/a", "file://a/b"] {
        assert!(Storage::open(address).is_err(), "{address}");
    }
    // Paths of this machine, not addresses.
    assert!(matches!(Storage::open("./a://b").unwrap().place, Place::Local(_)));
}
