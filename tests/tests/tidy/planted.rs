//! The defects that `.bench/planted/all` plants, so that they do not rot.

use std::fs;

use super::root;

#[test]
fn each_planted_defect_changes_one_place_and_names_the_check_that_finds_it() {
    let mut defects = 0;
    for path in fs::read_dir(root().join(".bench/planted")).unwrap().map(|e| e.unwrap().path()) {
        if path.extension().is_none_or(|extension| extension != "edit") {
            continue;
        }
        let name = path.file_stem().unwrap().to_str().unwrap();
        defects += 1;
        let text = fs::read_to_string(&path).unwrap();
        let mut head = text.lines();
        let (what, area, check) = (head.next(), head.next(), head.next());
        let check = check.and_then(|line| line.strip_prefix("found by: ")).unwrap_or_default();
        let is_known = ["simulation", "test ", "jobs "].iter().any(|kind| check.starts_with(kind));
        let has_area = area.is_some_and(|line| line.starts_with("area: "));
        assert!(what.is_some() && has_area && is_known, "{name}: its first three lines");
        let mut edits = text.split("\n--- ").skip(1).peekable();
        assert!(edits.peek().is_some(), "{name}: no edits");
        for edit in edits {
            let (file, lines) = edit.split_once("\n<<<<<<<\n").unwrap();
            let (old, new) = lines.split_once("\n=======\n").unwrap();
            let new = new.trim_end().strip_suffix("\n>>>>>>>").unwrap();
            let source = fs::read_to_string(root().join(file)).unwrap();
            let places = source.matches(&format!("{old}\n")).count();
            assert!(places == 1, "{name}: {file} has these lines {places} times:\n{old}");
            assert!(new.contains("PLANTED"), "{name}: it is always planted");
        }
    }
    assert!(defects > 40, "{defects} defects");
}
