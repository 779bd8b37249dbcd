//! Names of functions, from the symbol tables of the files that this process has mapped.
//!
//! **Invariant:** no lock of the dynamic linker is taken, because a thread may hang while it holds
//! it. Files of other programs are read as data.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use object::{Object as _, ObjectSegment as _, ObjectSymbol as _, ReadCache, SymbolKind};

/// Names of functions by addresses within them.
#[derive(Debug)]
pub(super) struct Names(BTreeMap<usize, String>);

/// A file that is mapped to be executed.
struct Mapping {
    start: usize,
    end: usize,
    /// Offset of `start` in the file.
    offset: u64,
    path: String,
}

impl Names {
    /// The names of the functions with these addresses.
    pub(super) fn of(addresses: impl Iterator<Item = usize>) -> Self {
        let deadline = Instant::now() + LIMIT;
        let mappings = mappings(&fs::read_to_string("/proc/self/maps").unwrap_or_default());
        let mut names = BTreeMap::new();
        let mut by_file = BTreeMap::<&str, BTreeMap<u64, usize>>::new();
        for address in addresses.collect::<BTreeSet<usize>>() {
            let found = mappings.iter().find(|m| (m.start..m.end).contains(&address));
            let Some(mapping) = found else {
                names.insert(address, "?".into());
                continue;
            };
            let offset = mapping.offset + (address - mapping.start) as u64;
            let file = Path::new(&mapping.path).file_name().unwrap_or_default();
            names.insert(address, format!("{}+{offset:#x}", file.to_string_lossy()));
            by_file.entry(&mapping.path).or_default().insert(offset, address);
        }
        for (path, offsets) in by_file {
            if Instant::now() < deadline {
                names.extend(look_up(path, &offsets).unwrap_or_default());
            }
        }
        Self(names)
    }

    /// The name of the function with this address, or the file and the offset in it.
    pub(super) fn name(&self, address: usize) -> String {
        self.0.get(&address).cloned().unwrap_or_default()
    }
}

fn mappings(maps: &str) -> Vec<Mapping> {
    let mapping = |line: &str| {
        let mut words = line.splitn(6, ' ');
        let (range, rights, offset) = (words.next()?, words.next()?, words.next()?);
        let path = words.nth(2)?.trim();
        let (start, end) = range.split_once('-')?;
        let number = |digits| usize::from_str_radix(digits, 16).ok();
        let (start, end, offset) = (number(start)?, number(end)?, number(offset)? as u64);
        let is_code = rights.as_bytes().get(2) == Some(&b'x') && !path.is_empty();
        is_code.then(|| Mapping { start, end, offset, path: path.replace(char::is_control, " ") })
    };
    maps.lines().filter_map(mapping).collect()
}

/// The names at these offsets of a file, by their addresses in memory.
fn look_up(path: &str, offsets: &BTreeMap<u64, usize>) -> Option<BTreeMap<usize, String>> {
    // The file of a program may have been replaced since it was started.
    let file = match path.strip_suffix(" (deleted)") {
        Some(path) if fs::read_link("/proc/self/exe").ok()?.to_str()?.starts_with(path) => {
            File::open("/proc/self/exe")
        }
        _ => File::open(path),
    };
    let cache = ReadCache::new(file.ok()?);
    let object = object::File::parse(&cache).ok()?;
    let mut wanted = BTreeMap::new();
    for segment in object.segments() {
        let (offset, bytes) = segment.file_range();
        for (at, memory) in offsets.range(offset..offset.saturating_add(bytes)) {
            wanted.insert(segment.address() + (at - offset), *memory);
        }
    }
    let mut names = BTreeMap::new();
    for symbol in object.symbols().chain(object.dynamic_symbols()) {
        let range = symbol.address()..symbol.address().saturating_add(symbol.size());
        if symbol.kind() != SymbolKind::Text || range.is_empty() {
            continue;
        }
        for (_, memory) in wanted.range(range) {
            if let Ok(name) = symbol.name() {
                names.entry(*memory).or_insert_with(|| readable(name));
            }
        }
    }
    Some(names)
}

/// A name as it is in the source text.
fn readable(name: &str) -> String {
    let name = format!("{:#}", rustc_demangle::demangle(name));
    let name = name.replace(char::is_control, " ");
    elasticdl_proto::limits::clip(name, NAME_BYTES_MAX)
}

/// Longer names are cut: those of generic functions contain all of their types.
const NAME_BYTES_MAX: usize = 200;
/// Limit of the time for all files.
const LIMIT: Duration = Duration::from_millis(800);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_the_names_of_the_source_text_and_other_addresses_their_file() {
        let own = functions_have_the_names_of_the_source_text_and_other_addresses_their_file;
        let own = own as fn() as usize;
        let names = Names::of([own + 1, 8].into_iter());
        assert!(names.name(own + 1).contains("symbols::tests::functions_have"), "{names:?}");
        assert_eq!(names.name(8), "?");
        let maps = "7f00-7f80 r-xp 00002000 fe:01 99   /lib/a b.so\n7f80-7f90 rw-p 0 0:0 0 \n";
        let parsed = mappings(maps);
        let only = &parsed[0];
        assert_eq!((parsed.len(), only.start, only.end), (1, 0x7f00, 0x7f80));
        assert_eq!((only.offset, only.path.as_str()), (0x2000, "/lib/a b.so"));
    }
}
