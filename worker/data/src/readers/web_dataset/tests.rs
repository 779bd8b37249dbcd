use super::*;
use crate::readers::images::tests::png;

/// A tar file of these members.
pub(in crate::readers) fn tar(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = ::tar::Builder::new(Vec::new());
    for (path, content) in members {
        let mut header = ::tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, path, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

fn written(name: &str, bytes: &[u8]) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (folder, path)
}

fn reader() -> WebDataset {
    WebDataset::new().image("jpg;png", [2, 3, 1]).class("cls", 10).label().text("txt")
}

fn configured(purpose: Purpose, bad_records_max: u64) -> WebDataset {
    let mut reader = reader();
    reader.configure(ReadOptions { purpose, bad_records_max }).unwrap();
    reader
}

/// Three samples; the names of the last are longer than a header of tar has place for.
fn three() -> Vec<u8> {
    let long = "l".repeat(150);
    tar(&[
        ("a/0001.png", &png(1)),
        ("a/0001.cls", b"7\n"),
        ("a/0001.txt", "seven".as_bytes()),
        ("a/0001.seg.png", b"not requested"),
        ("a/0002.TXT", b""),
        ("a/0002.cls", b" 0"),
        ("a/0002.png", &png(2)),
        ("readme.md", b"not a sample"),
        (&format!("{long}.png"), &png(3)),
        (&format!("{long}.txt"), b"three"),
        (&format!("{long}.cls"), b"3"),
    ])
}

fn texts(rows: &[Row]) -> Vec<(usize, &str)> {
    rows.iter().map(|row| (row.class(1), row.text(2))).collect()
}

#[test]
fn members_of_one_base_name_are_a_sample() {
    let (_folder, path) = written("a.tar", &three());
    let mut reader = reader();
    let dataset = reader.describe(&path).unwrap();
    let [file] = &dataset.files[..] else { panic!("{dataset:?}") };
    assert_eq!(file.records, 3);
    let rows = reader.read(file, 0..3).unwrap();
    assert_eq!(texts(&rows), [(7, "seven"), (0, ""), (3, "three")]);
    assert_eq!(rows.iter().map(|row| row.bytes(0).len()).collect::<Vec<_>>(), [6, 6, 6]);
    assert_ne!(rows[0].bytes(0), rows[1].bytes(0));
    // Another worker's reader.
    assert_eq!(
        self::reader().read_records(file, &[0, 2]).unwrap(),
        [&rows[..1], &rows[2..]].concat()
    );
    let mut keyed = WebDataset::new().key().class("cls", 10);
    let dataset = keyed.describe(&path).unwrap();
    let rows = keyed.read(&dataset.files[0], 0..2).unwrap();
    assert_eq!(
        [0, 1].map(|row| (rows[row].text(0), rows[row].class(1))),
        [("a/0001", 7), ("a/0002", 0)]
    );
    let mut raw = WebDataset::new().bytes("seg.png");
    let dataset = raw.describe(&path).unwrap();
    let row = &raw.read(&dataset.files[0], 0..1).unwrap()[0];
    assert_eq!((dataset.files[0].records, row.bytes(0)), (1, &b"not requested"[..]));
}

#[test]
fn what_does_not_fit_is_an_error_with_file_sample_and_member() {
    let refusal = |bytes: &[u8]| {
        let (_folder, path) = written("a.tar", bytes);
        reader().describe(&path).unwrap_err().to_string().replace(&path, "")
    };
    let png = png(1);
    let (image, text) = (("1.png", &*png), ("1.txt", &b"one"[..]));
    assert_eq!(refusal(&tar(&[image, text])), ": sample \"1\", \"cls\": the sample lacks it");
    assert_eq!(
        refusal(&tar(&[image, text, ("1.cls", b"10")])),
        ": sample \"1\", \"cls\": \"10\" where an integer from 0 to 9 should be"
    );
    assert_eq!(
        refusal(&tar(&[("1.jpg", b"GIF89a"), text, ("1.cls", b"1")])),
        ": sample \"1\", \"jpg;png\": neither a PNG nor a JPEG image"
    );
    assert_eq!(
        refusal(&tar(&[image, text, ("1.cls", b"1"), ("1.jpg", b"")])),
        ": sample \"1\" has two members \"jpg;png\""
    );
    assert_eq!(
        refusal(&tar(&[image, ("1.txt", b"\xff"), ("1.cls", b"1")])),
        ": sample \"1\", \"txt\": bytes that are not UTF-8"
    );
    let cut = refusal(&three()[..1000]);
    assert_eq!(cut.split(": ").nth(1), Some("sample \"a/0001\", \"cls\""), "{cut}");
    assert!(refusal(&[7; 1024]).starts_with(": not a readable tar file"));
    assert_eq!(refusal(&tar(&[("readme.md", b"x")])), ": no sample in any tar file");
}

#[test]
fn bad_samples_are_left_out_up_to_a_limit() {
    let (good, bad) = (png(1), &b"x"[..]);
    let sample = |key: &'static str, image| {
        [
            (format!("{key}.png"), image),
            (format!("{key}.cls"), &b"1"[..]),
            (format!("{key}.txt"), key.as_bytes()),
        ]
    };
    let members = [sample("a", &good[..]), sample("b", bad), sample("c", &good[..])].concat();
    let members: Vec<(&str, &[u8])> = members.iter().map(|(n, content)| (&**n, *content)).collect();
    let (_folder, path) = written("a.tar", &tar(&members));
    let dataset = configured(Purpose::Train, 1).describe(&path).unwrap();
    assert_eq!((dataset.files[0].records, dataset.skipped.bad), (2, 1));
    let expected = format!("{path}: sample \"b\", \"jpg;png\": neither a PNG nor a JPEG image");
    assert_eq!(dataset.skipped.first, std::slice::from_ref(&expected));
    let rows = configured(Purpose::Train, 1).read(&dataset.files[0], 0..2).unwrap();
    assert_eq!(texts(&rows), [(1, "a"), (1, "c")]);
    // Without, the bad sample is found when it is read.
    let dataset = reader().describe(&path).unwrap();
    let error = reader().read(&dataset.files[0], 1..2).unwrap_err().to_string();
    assert_eq!(error, expected);
}

#[test]
fn predictions_need_no_label() {
    let (_folder, path) = written("a.tar", &tar(&[("1.png", &png(1)), ("1.txt", b"one")]));
    let mut reader = configured(Purpose::Predict, 0);
    let dataset = reader.describe(&path).unwrap();
    assert_eq!(texts(&reader.read(&dataset.files[0], 0..1).unwrap()), [(0, "one")]);
}
