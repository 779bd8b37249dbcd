//! Rows that are written are read again, and nothing else is taken for them.

use std::fs;
use std::sync::Arc;

use elasticdl_data::storage::Storage;
use elasticdl_tables::{BatchRows, ExportedRows, Ids, Part, Table, shard_of};

use super::*;
use crate::model::NamedTensor;
use crate::weights;

struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// Files in the folder of parts.
    fn parts(&self, name: &str) -> Vec<String> {
        let files = fs::read_dir(self.path(&format!("{name}.tables"))).unwrap();
        let mut files: Vec<String> =
            files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        files.sort();
        files
    }

    /// Exports rows, each of which is its id times `factor`, in `parts`.
    fn export(&self, name: &str, (parts, factor): (u32, f32)) -> ExportedTables {
        let address = self.path(name);
        let of_part = |index| {
            let of_table = |(table, spec): (usize, &Table)| {
                let belongs = |id: &u64| shard_of(table as u32, *id, parts) == index;
                let ids: Vec<u64> = (0..100).map(|i| i * 1_000_003).filter(belongs).collect();
                let touches = ids.iter().map(|id| *id as u32 % 7 + 1).collect();
                let row = |&id| (0..spec.dim as u64).map(move |i| (id + i) as f32 * factor);
                ExportedRows { values: ids.iter().flat_map(row).collect(), ids, touches }
            };
            let rows = tables().iter().enumerate().map(of_table).collect();
            write_part(&address, Part { index, parts }, &tables(), rows).unwrap()
        };
        let parts = (0..parts).map(of_part).collect();
        let exported = ExportedTables { seed: 5, ..exported(parts) };
        exported.check_parts(&address).unwrap();
        let replaced = ExportedTables::read(&Storage::open(&address).unwrap()).ok().flatten();
        save(&address, serde_json::to_string(&exported).unwrap());
        exported.remove_replaced(&address, replaced);
        exported
    }
}

fn save(address: &str, note: String) {
    let layout = [NamedTensor::new("bias", [])];
    weights::save_noted(address, &layout, &Arc::new(vec![0.5]), vec![(NOTE, note)]).unwrap();
}

fn exported(parts: Vec<ExportedPart>) -> ExportedTables {
    let (touches_without_row, changes_since) = (vec![0, 7], None);
    ExportedTables { tables: tables(), seed: 0, touches_without_row, changes_since, parts }
}

fn tables() -> Vec<Table> {
    vec![Table::new("one", 1), Table::new("three", 3)]
}

/// Rows of ids that are there, and of some that are not.
fn look_up(rows: &mut TrainedRows) -> Result<(), String> {
    let mut ids = rows.ids();
    let known = [0, 1_000_003, 99 * 1_000_003];
    let unknown = [1, u64::MAX];
    for id in known.into_iter().chain(unknown) {
        ids.push(0, id);
        ids.push(1, id);
    }
    let (mut found, mut initial) = (rows.look_up(&ids)?, BatchRows::initial(&tables(), 5, &ids));
    for (table, dim) in [(0, 1), (1, 3)] {
        let expected = known.iter().flat_map(|id| (0..dim).map(move |i| (id + i) as f32 * 2.0));
        let (found, initial) = (found.of(table).0, initial.of(table).0);
        let len = known.len() * dim as usize;
        assert_eq!(found[..len], expected.collect::<Vec<f32>>());
        assert_eq!(found[len..], initial[len..]);
        assert!(initial[len..].iter().all(|value| *value != 0.0));
    }
    Ok(())
}

#[test]
fn rows_are_read_by_id_and_others_have_their_initial_values() {
    for parts in [1, 4, 64] {
        let place = Place::new();
        place.export("m", (parts, 2.0));
        let mut rows = TrainedRows::open(&place.path("m"), &tables()).unwrap().unwrap();
        for _ in 0..2 {
            look_up(&mut rows).unwrap();
        }
        let mut none = TrainedRows::open(&place.path("m"), &tables()).unwrap().unwrap();
        none.look_up(&Ids::new(2)).unwrap();
    }
}

#[test]
fn a_part_that_is_missing_or_has_changed_is_an_error_that_names_it() {
    let place = Place::new();
    let part = place.export("m", (1, 2.0)).parts.remove(0);
    let path = place.path(&part.file);
    let whole = fs::read(&path).unwrap();
    let error = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let mut rows = TrainedRows::open(&place.path("m"), &tables()).unwrap().unwrap();
        let error = look_up(&mut rows).unwrap_err();
        assert!(error.contains(&part.file), "{error}");
        error
    };
    assert!(error(&whole[..whole.len() - 1]).contains("bytes, not"));
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize + 8;
    let mut swapped = whole.clone();
    swapped.copy_within(header + 8..header + 16, header + 16);
    assert!(error(&swapped).contains("the ids of table \"one\" are not those of a part"));
    for at in 0..header {
        let mut changed = whole.clone();
        changed[at] = 0xff;
        error(&changed);
    }
    fs::write(&path, &whole).unwrap();
    look_up(&mut TrainedRows::open(&place.path("m"), &tables()).unwrap().unwrap()).unwrap();
    fs::remove_file(&path).unwrap();
    let mut rows = TrainedRows::open(&place.path("m"), &tables()).unwrap().unwrap();
    assert!(look_up(&mut rows).unwrap_err().contains(&part.file));
}

#[test]
fn a_model_of_other_tables_is_refused_with_what_differs() {
    let place = Place::new();
    place.export("m", (1, 1.0));
    let error =
        |name: &str, tables: &[Table]| TrainedRows::open(&place.path(name), tables).unwrap_err();
    assert!(error("m", &[]).contains("it has 2 tables, and this model has 0"));
    let other = [Table::new("one", 1), Table::new("three", 4)];
    assert!(error("m", &other).contains("rows of 3 numbers, and here of 4"));
    save(&place.path("other"), "{}".into());
    assert!(error("other", &tables()).contains("can't be read: missing field"));
    let layout = [NamedTensor::new("bias", [])];
    weights::save(&place.path("dense"), &layout, &Arc::new(vec![0.5])).unwrap();
    assert!(error("dense", &tables()).contains("it has 0 tables, and this model has 2"));
    assert!(TrainedRows::open(&place.path("dense"), &[]).unwrap().is_none());
    let part = |file: &str| ExportedPart { file: file.into(), bytes: 9 };
    for (parts, reason) in [
        (vec![part("../x")], "\"../x\" is no file in its folder"),
        (vec![part("/etc/passwd")], "is no file in its folder"),
        (vec![part("a"), part("b"), part("c")], "3 parts"),
        (vec![], "0 parts"),
    ] {
        let exported = exported(parts);
        save(&place.path("other"), serde_json::to_string(&exported).unwrap());
        assert!(error("other", &tables()).contains(reason), "{}", error("other", &tables()));
    }
}

#[test]
fn parts_of_a_replaced_model_are_removed_unless_a_kept_model_has_them() {
    let place = Place::new();
    let names = |exported: &ExportedTables| {
        let names = exported.parts.iter().map(|part| part.file.rsplit('/').next().unwrap().into());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    };
    let first = place.export("m", (2, 1.0));
    assert_eq!(place.parts("m"), names(&first));
    let second = place.export("m", (2, 2.0));
    assert_eq!(place.parts("m"), names(&second));
    assert_eq!(names(&place.export("m", (2, 2.0))), names(&second), "the same rows");
    assert_eq!(place.parts("m"), names(&second));
    fs::copy(place.path("m"), place.path("m.previous")).unwrap();
    let third = place.export("m", (1, 3.0));
    let fourth = place.export("m", (1, 4.0));
    let mut expected = [names(&second), names(&fourth)].concat();
    expected.sort();
    assert_eq!(place.parts("m"), expected);
    assert_ne!(names(&third), names(&fourth));
    look_up(&mut TrainedRows::open(&place.path("m.previous"), &tables()).unwrap().unwrap())
        .unwrap();
}

#[test]
fn parts_are_found_beside_the_model_whatever_its_address_looks_like() {
    let addresses = ["m.st", "./m.st", "a/m.st", "/a/m.st", "s3://bucket/a/m.st"];
    let folders = ["./", "./", "a/", "/a/", "s3://bucket/a/"];
    assert_eq!(addresses.map(index::folder_of), folders);
}

#[test]
fn the_number_of_parts_depends_on_the_rows_and_names_are_unique() {
    let table = [Table::new("one", 16)];
    let parts = |rows| parts_of(&table, &[rows]);
    let rows = [0, 1, 500, 1000, 7_000_000, 16_000_000, u64::MAX >> 8];
    assert_eq!(rows.map(parts), [1, 1, 2, 4, 8, 32, 1024]);
    assert_eq!(check_names(&tables()), Ok(()));
    let error = check_names(&[Table::new("a", 1), Table::new("a.ids", 1)]).unwrap_err();
    assert!(error.contains("table \"a.ids\" can't be exported"), "{error}");
}
