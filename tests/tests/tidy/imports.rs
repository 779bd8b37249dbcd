//! Which file of a crate imports from which, as far as the text shows it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::source::code;

/// The imports of one crate's files, without those for tests.
///
/// A name that a module re-exports counts as an import from the file that defines it, so that a
/// `mod.rs` or `lib.rs` that collects names joins no cycle.
#[derive(Debug, Default)]
pub(crate) struct Imports {
    /// Modules by path within the crate; the root is empty.
    modules: BTreeMap<Vec<String>, Module>,
    /// Files by importing file.
    pub(crate) arrows: BTreeMap<PathBuf, BTreeSet<PathBuf>>,
}

#[derive(Debug)]
struct Module {
    file: PathBuf,
    code: String,
    /// Names that `use` brings into the module, with their paths.
    names: BTreeMap<String, Vec<String>>,
    globs: Vec<Vec<String>>,
}

impl Imports {
    /// Reads the files of the crate with this root file, `lib.rs` or `main.rs`.
    pub(crate) fn of(root: &Path) -> Self {
        let mut imports = Self::default();
        imports.read(root, Vec::new());
        for (path, module) in &imports.modules {
            let mut paths: Vec<_> = module.names.values().chain(&module.globs).cloned().collect();
            paths.extend(inline_paths(&module.code));
            let children = imports
                .modules
                .keys()
                .filter(|other| other.split_last().is_some_and(|(_, parent)| parent == path));
            for name in children.filter_map(|child| child.last()) {
                if has_word(&module.code, &format!("{name}::")) {
                    paths.push(vec![name.clone()]);
                }
            }
            let targets = paths.iter().filter_map(|target| imports.resolve(path, target, 0));
            let targets = targets.filter(|file| *file != module.file);
            imports.arrows.insert(module.file.clone(), targets.collect());
        }
        imports
    }

    fn read(&mut self, file: &Path, path: Vec<String>) {
        let code = code(&fs::read_to_string(file).unwrap());
        let (mut names, mut globs) = (BTreeMap::new(), Vec::new());
        for statement in statements(&code, "use") {
            for (path, name) in tree(&statement) {
                match name.as_str() {
                    "*" => globs.push(path),
                    _ => drop(names.insert(name, path)),
                }
            }
        }
        let stem = file.file_stem().unwrap().to_str().unwrap();
        let folder = match stem {
            "lib" | "main" | "mod" => file.parent().unwrap().to_path_buf(),
            _ => file.with_extension(""),
        };
        for name in statements(&code, "mod") {
            let files = [folder.join(format!("{name}.rs")), folder.join(&name).join("mod.rs")];
            if let Some(file) = files.iter().find(|file| file.exists()) {
                self.read(file, [path.clone(), vec![name]].concat());
            }
        }
        self.modules.insert(path, Module { file: file.to_path_buf(), code, names, globs });
    }

    /// The file that defines what `path` means in the module `at`; `None` if that is another crate.
    fn resolve(&self, at: &[String], path: &[String], depth: usize) -> Option<PathBuf> {
        if depth > 8 {
            return None;
        }
        let mut module = at.to_vec();
        let mut rest = path.iter().peekable();
        match path.first()?.as_str() {
            "crate" => module.clear(),
            "self" | "super" => {}
            first => {
                let child = [at, &[first.to_owned()]].concat();
                if !self.modules.contains_key(&child) {
                    let full = self.modules[at].names.get(first).filter(|full| full[0] != first)?;
                    return self.resolve(at, &[full, &path[1..]].concat(), depth + 1);
                }
            }
        }
        while let Some(name) = rest.next() {
            match name.as_str() {
                "crate" | "self" => continue,
                "super" => {
                    module.pop()?;
                    continue;
                }
                _ => {}
            }
            let child = [&module[..], std::slice::from_ref(name)].concat();
            if self.modules.contains_key(&child) {
                module = child;
                continue;
            }
            let here = &self.modules[&module];
            // A module within a file, such as generated code, imports nothing.
            if has_word(&here.code, &format!("mod {name} {{")) {
                return None;
            }
            if let Some(full) = here.names.get(name) {
                let rest: Vec<String> = rest.cloned().collect();
                return self.resolve(&module, &[&full[..], &rest].concat(), depth + 1);
            }
            let defines = |file: &PathBuf| {
                let code = self.modules.values().find(|m| m.file == *file).map(|m| &m.code);
                code.is_some_and(|code| defines(code, name))
            };
            let globs = here.globs.iter().filter_map(|glob| self.resolve(&module, glob, depth + 1));
            return globs.into_iter().find(defines).or_else(|| Some(here.file.clone()));
        }
        Some(self.modules[&module].file.clone())
    }

    /// Files that import each other in a circle: the strongly connected components of more than
    /// `most` files.
    pub(crate) fn cycles(&self, most: usize) -> Vec<Vec<&Path>> {
        let reach: BTreeMap<_, _> =
            self.arrows.keys().map(|file| (file, self.reachable(file))).collect();
        let mut seen = BTreeSet::new();
        let mut cycles = Vec::new();
        for file in self.arrows.keys() {
            let others = reach[file].iter().copied().filter(|other| reach[*other].contains(file));
            let cycle: Vec<&Path> = others.map(PathBuf::as_path).collect();
            if cycle.len() > most && seen.insert(cycle.clone()) {
                cycles.push(cycle);
            }
        }
        cycles
    }

    fn reachable<'a>(&'a self, from: &'a PathBuf) -> BTreeSet<&'a PathBuf> {
        let mut found = BTreeSet::new();
        let mut open = vec![from];
        while let Some(file) = open.pop() {
            open.extend(self.arrows[file].iter().filter(|other| found.insert(*other)));
        }
        found
    }
}

/// Texts between this keyword and the next semicolon: names of modules, trees of imports.
fn statements(code: &str, keyword: &str) -> Vec<String> {
    let starts = code.match_indices(keyword).filter(|(at, _)| is_word(code, *at, keyword.len()));
    let texts = starts.filter_map(|(at, _)| code[at + keyword.len()..].split(';').next());
    let compact = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let texts = texts.map(compact);
    texts.filter(|text| keyword == "use" || text.chars().all(is_name_char)).collect()
}

fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn is_word(code: &str, at: usize, len: usize) -> bool {
    let before = code[..at].chars().next_back();
    let after = code[at + len..].chars().next();
    !before.is_some_and(|c| is_name_char(c) || c == ':') && after.is_some_and(char::is_whitespace)
}

fn has_word(code: &str, word: &str) -> bool {
    let mut found = code.match_indices(word);
    found.any(|(at, _)| !code[..at].ends_with(|c: char| is_name_char(c) || c == ':'))
}

fn defines(code: &str, name: &str) -> bool {
    ["const", "enum", "fn", "static", "struct", "trait", "type"]
        .iter()
        .any(|keyword| has_word(code, &format!("{keyword} {name}")))
}

/// The paths of a tree of imports, each with the name that it gets.
fn tree(text: &str) -> Vec<(Vec<String>, String)> {
    let text = text.trim();
    let Some((prefix, rest)) = text.split_once('{') else {
        let (path, alias) = text.split_once(" as ").unwrap_or((text, ""));
        let mut path: Vec<String> = path.split("::").map(|name| name.trim().to_owned()).collect();
        let last = path.pop().unwrap_or_default();
        let name = match (alias, last.as_str()) {
            ("", "self") => path.last().cloned().unwrap_or_default(),
            ("", last) => last.to_owned(),
            (alias, _) => alias.to_owned(),
        };
        if last != "self" && last != "*" {
            path.push(last);
        }
        return vec![(path, name)];
    };
    let inner = rest.trim_end().strip_suffix('}').unwrap_or(rest);
    let (mut parts, mut depth) = (vec![String::new()], 0_usize);
    for c in inner.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().unwrap().push(c);
    }
    let whole = parts.iter().filter(|part| !part.trim().is_empty());
    whole.flat_map(|part| tree(&format!("{}{}", prefix.trim(), part.trim()))).collect()
}

/// Paths from the crate's root or the parent module outside of `use`.
fn inline_paths(code: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    for start in ["crate::", "super::"] {
        for (at, _) in code.match_indices(start) {
            let is_start = !code[..at].ends_with(|c: char| is_name_char(c) || c == ':' || c == '$');
            let end = code[at..].find(|c: char| !is_name_char(c) && c != ':');
            let path = &code[at..end.map_or(code.len(), |end| at + end)];
            // Before a brace or an asterisk it is the beginning of a tree of imports.
            if is_start && !path.ends_with("::") {
                let names = path.split("::").map(|name| name.trim_end_matches(':').to_owned());
                paths.push(names.collect());
            }
        }
    }
    paths
}

#[test]
fn a_re_exported_name_is_imported_from_the_file_that_defines_it() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("lib.rs", "mod a; mod b; mod c; pub use a::One; pub use c::*;");
    write("a.rs", "use crate::{b::{self, Two as Deux}, Three}; pub struct One;");
    write("b.rs", "mod inner; pub struct Two(inner::Four); #[cfg(test)] use crate::One;");
    write("b/inner.rs", "pub struct Four; fn f() { super::super::One; }");
    write("c.rs", "// use crate::One;\npub struct Three;");
    let imports = Imports::of(&folder.path().join("lib.rs"));
    let of = |name: &str| {
        let targets = &imports.arrows[&folder.path().join(name)];
        let inside = |path: &PathBuf| path.strip_prefix(folder.path()).unwrap().to_owned();
        targets.iter().map(|path| inside(path).to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(of("a.rs"), ["b.rs", "c.rs"]);
    assert_eq!(of("b.rs"), ["b/inner.rs"]);
    assert_eq!(of("b/inner.rs"), ["a.rs"]);
    assert_eq!(of("c.rs"), [""; 0]);
    assert_eq!(imports.cycles(2).len(), 1);
    assert_eq!(imports.cycles(3).len(), 0);
}
