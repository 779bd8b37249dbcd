//! Files in Arrow's IPC format: where their messages are, and what record batches contain.
//!
//! A file begins with `ARROW1` and has a footer that lists its messages. A stream, as Hugging Face
//! datasets are stored, has neither: its messages are found one after the other. In both, a message
//! is metadata, in a flatbuffer, and a body of buffers to which the metadata points. The decoder
//! takes these places for granted, so they are checked first.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::{FileDecoder, read_footer_length};
use arrow_ipc::{
    Block, Endianness, MetadataVersion, RecordBatch as Header, root_as_footer, root_as_message,
};
use arrow_schema::{DataType, Schema};

use super::super::files;
use super::super::parts::{PartFile, Window, Windows, malformed};
use super::super::values::{Leaf, leaves};
use crate::reader::DataError;

/// An open file.
#[derive(Debug)]
pub(super) struct IpcFile {
    path: PathBuf,
    schema: Arc<Schema>,
    leaves: Vec<Leaf>,
    version: MetadataVersion,
    /// The dictionaries of columns of text, in their order.
    dictionaries: Vec<Block>,
    batches: Vec<Batch>,
    /// Number of rows of each batch.
    rows: Vec<u64>,
}

/// A record batch in a file.
#[derive(Clone, Copy, Debug)]
struct Batch {
    block: Block,
    /// Number of dictionaries that precede it.
    dictionaries: usize,
}

impl PartFile for IpcFile {
    const PART: &'static str = "batch";
    const EXTENSIONS: &'static [&'static str] = &["arrow", "arrows", "feather", "ipc"];
    /// The records of a few blocks are shuffled among each other, and batches are decoded whole.
    const OPEN_MAX: usize = 4;

    /// Reads the schema of a file, and finds its messages.
    fn open(path: &Path) -> Result<Self, DataError> {
        let bytes = files::length(path)?;
        let head = files::read(path, 0, bytes.min(MAGIC.len() as u64))?;
        let file =
            if head == MAGIC { Self::from_footer(path, bytes)? } else { Self::scan(path, bytes)? };
        for field in file.schema.flattened_fields() {
            // The decoder reads all dictionaries.
            if let DataType::Dictionary(_, values) = field.data_type()
                && !matches!(**values, DataType::Utf8 | DataType::LargeUtf8)
            {
                let reason =
                    format!("column {:?} is a dictionary of {values}, not of Utf8", field.name());
                return Err(files::malformed(path, &reason));
            }
        }
        Ok(file)
    }

    fn leaves(&self) -> &[Leaf] {
        &self.leaves
    }

    fn rows(&self) -> &[u64] {
        &self.rows
    }

    fn read(
        self: Arc<Self>,
        part: usize,
        leaves: &[usize],
        _from: u64,
    ) -> Result<Windows, DataError> {
        let leaves: Vec<&Leaf> = leaves.iter().map(|&leaf| &self.leaves[leaf]).collect();
        let roots = BTreeSet::from_iter(leaves.iter().map(|leaf| leaf.root));
        let batch = self.batch(part, Vec::from_iter(roots.iter().copied()))?;
        let roots = BTreeMap::from_iter(roots.into_iter().zip(batch.columns()));
        let columns = leaves.iter().map(|leaf| leaf.values(roots[&leaf.root])).collect();
        let rows = 0..self.rows[part];
        Ok(Box::new(std::iter::once(Ok(Window { rows, columns }))))
    }

    fn read_ahead(&self, part: usize, _leaves: &[usize], _rows: Range<u64>) {
        let block = self.batches[part].block;
        let bytes = block.bodyLength().saturating_add(block.metaDataLength().into());
        files::read_ahead(&self.path, block.offset() as u64, bytes as u64);
    }
}

impl IpcFile {
    /// A file with this schema, whose messages are to be found.
    fn new(
        path: &Path,
        schema: arrow_ipc::Schema<'_>,
        version: MetadataVersion,
    ) -> Result<Self, String> {
        if schema.endianness() != Endianness::Little {
            return Err("its numbers are big-endian; write it on another machine".into());
        }
        let schema = Arc::new(try_fb_to_schema(schema).map_err(|error| error.to_string())?);
        let leaves = leaves(&schema);
        let (dictionaries, batches, rows) = Default::default();
        Ok(Self { path: path.into(), schema, leaves, version, dictionaries, batches, rows })
    }

    /// Decodes the columns of a record batch that are the fields `roots`.
    fn batch(&self, part: usize, roots: Vec<usize>) -> Result<RecordBatch, DataError> {
        let batch = &self.batches[part];
        let wrong = |reason: String| malformed::<Self>(&self.path, part, &reason);
        let mut decoder =
            FileDecoder::new(Arc::clone(&self.schema), self.version).with_projection(roots);
        for block in &self.dictionaries[..batch.dictionaries] {
            let message = self.message(block)?;
            check_dictionary(&message, block).map_err(wrong)?;
            decoder.read_dictionary(block, &message).map_err(|error| wrong(error.to_string()))?;
        }
        let message = self.message(&batch.block)?;
        check_batch(&message, &batch.block).map_err(wrong)?;
        // The validation of dictionary keys asserts that their buffer has whole keys.
        let read = AssertUnwindSafe(|| decoder.read_record_batch(&batch.block, &message));
        let read = catch_unwind(read).map_err(|_| wrong("a buffer has another length".into()))?;
        match read.map_err(|error| wrong(error.to_string()))? {
            Some(read) if read.num_rows() as u64 == self.rows[part] => Ok(read),
            _ => Err(wrong(format!("not {} rows: has it changed?", self.rows[part]))),
        }
    }

    fn from_footer(path: &Path, bytes: u64) -> Result<Self, DataError> {
        let wrong = |reason: &str| files::malformed(path, &format!("{UNREADABLE}: {reason}"));
        let end = bytes.checked_sub(TRAILER_BYTES).ok_or_else(|| wrong("it has no footer"))?;
        let trailer = files::read(path, end, TRAILER_BYTES)?;
        let trailer = trailer.try_into().expect("this many bytes were read");
        let length = read_footer_length(trailer).map_err(|error| wrong(&error.to_string()))?;
        let start = end.checked_sub(length as u64).ok_or_else(|| wrong("its footer is longer"))?;
        let footer = files::read(path, start, length as u64)?;
        let footer = root_as_footer(&footer).map_err(|error| wrong(&error.to_string()))?;
        let schema = footer.schema().ok_or_else(|| wrong("it has no schema"))?;
        let file = Self::new(path, schema, footer.version());
        let mut file = file.map_err(|reason| wrong(&reason))?;
        let check = |block: &Block| {
            let (at, metadata) = (block.offset(), block.metaDataLength());
            let ends =
                at.checked_add(metadata.into()).and_then(|m| m.checked_add(block.bodyLength()));
            let fits = ends.is_some_and(|ends| ends as u64 <= start);
            if at < 0 || metadata < PREFIX_BYTES as i32 || block.bodyLength() < 0 || !fits {
                return Err(wrong("its footer points outside of it"));
            }
            Ok(*block)
        };
        for block in footer.dictionaries().into_iter().flatten() {
            file.dictionaries.push(check(block)?);
        }
        for block in footer.recordBatches().into_iter().flatten() {
            let block = check(block)?;
            let metadata = files::read(path, block.offset() as u64, block.metaDataLength() as u64)?;
            let rows = rows(&metadata).map_err(|reason| wrong(&reason))?;
            file.batches.push(Batch { block, dictionaries: file.dictionaries.len() });
            file.rows.push(rows);
        }
        Ok(file)
    }

    fn scan(path: &Path, bytes: u64) -> Result<Self, DataError> {
        let wrong = |at: u64, reason: &str| {
            files::malformed(path, &format!("{UNREADABLE}: byte {at}: {reason}"))
        };
        let mut file: Option<Self> = None;
        let mut at = 0;
        while at < bytes {
            let head = files::read(path, at, PREFIX_BYTES.min(bytes - at))?;
            // Older writers have no marker before the length.
            let (prefix, length) = match *head {
                [0xff, 0xff, 0xff, 0xff, a, b, c, d] => (8, i32::from_le_bytes([a, b, c, d])),
                [a, b, c, d, ..] => (4, i32::from_le_bytes([a, b, c, d])),
                _ => return Err(wrong(at, "a message is cut off")),
            };
            let metadata = match u64::try_from(length) {
                Ok(0) => break,
                Ok(length) if length <= bytes - at - prefix => length + prefix,
                _ => return Err(wrong(at, "no message of Arrow's IPC format begins here")),
            };
            let message = files::read(path, at, metadata)?;
            let message = root_as_message(&message[prefix as usize..])
                .map_err(|error| wrong(at, &error.to_string()))?;
            let body = u64::try_from(message.bodyLength())
                .ok()
                .filter(|body| *body <= bytes - at - metadata)
                .ok_or_else(|| wrong(at, "a message is cut off"))?;
            let block = Block::new(at as i64, metadata as i32, body as i64);
            match (&mut file, message.header_as_schema()) {
                (None, Some(schema)) => {
                    let found = Self::new(path, schema, message.version());
                    file = Some(found.map_err(|reason| wrong(at, &reason))?);
                }
                (None, None) => return Err(wrong(at, "no schema")),
                (Some(_), Some(_)) => return Err(wrong(at, "a second schema")),
                (Some(file), None) => {
                    if let Some(batch) = message.header_as_record_batch() {
                        let rows = u64::try_from(batch.length())
                            .map_err(|_| wrong(at, "a negative number of rows"))?;
                        file.batches.push(Batch { block, dictionaries: file.dictionaries.len() });
                        file.rows.push(rows);
                    } else if message.header_as_dictionary_batch().is_some() {
                        file.dictionaries.push(block);
                    }
                }
            }
            at += metadata + body;
        }
        file.ok_or_else(|| files::malformed(path, &format!("{UNREADABLE}: it is empty")))
    }

    /// The bytes of a message.
    fn message(&self, block: &Block) -> Result<Buffer, DataError> {
        let bytes = block.bodyLength() as u64 + block.metaDataLength() as u64;
        Ok(files::read(&self.path, block.offset() as u64, bytes)?.into())
    }
}

/// The flatbuffer of a message: what follows its length.
fn flatbuffer(message: &[u8]) -> &[u8] {
    let prefix = if message.starts_with(&[0xff; 4]) { 8 } else { 4 };
    message.get(prefix..).unwrap_or_default()
}

/// The number of rows of a record batch.
fn rows(metadata: &[u8]) -> Result<u64, String> {
    let message = root_as_message(flatbuffer(metadata)).map_err(|error| error.to_string())?;
    let batch = message.header_as_record_batch().ok_or("no record batch where one should be")?;
    u64::try_from(batch.length()).map_err(|_| "a negative number of rows".into())
}

fn check_batch(message: &[u8], block: &Block) -> Result<(), String> {
    let (metadata, body) = message.split_at(block.metaDataLength() as usize);
    let message = root_as_message(flatbuffer(metadata)).map_err(|error| error.to_string())?;
    check(message.header_as_record_batch().ok_or("no record batch")?, body)
}

fn check_dictionary(message: &[u8], block: &Block) -> Result<(), String> {
    let (metadata, body) = message.split_at(block.metaDataLength() as usize);
    let message = root_as_message(flatbuffer(metadata)).map_err(|error| error.to_string())?;
    let dictionary = message.header_as_dictionary_batch().ok_or("no dictionary")?;
    check(dictionary.data().ok_or("a dictionary without values")?, body)
}

/// Checks that buffers are within the body, and that their decompression needs no more memory than
/// the size of the body justifies.
fn check(header: Header<'_>, body: &[u8]) -> Result<(), String> {
    let length_max = 64 * body.len() as i64 + LENGTH_MAX;
    let is_length = |length: i64| (0..=length_max).contains(&length);
    let mut nodes = header.nodes().into_iter().flatten();
    if !is_length(header.length())
        || !nodes.all(|node| is_length(node.length()) && is_length(node.null_count()))
    {
        return Err("it declares more values than it has".into());
    }
    let mut held = 0_u64;
    for buffer in header.buffers().into_iter().flatten() {
        let bytes = usize::try_from(buffer.offset()).ok().and_then(|start| {
            let end = start.checked_add(usize::try_from(buffer.length()).ok()?)?;
            body.get(start..end)
        });
        let Some(bytes) = bytes else { return Err("it points outside of itself".into()) };
        held = held.saturating_add(match (header.compression(), bytes.first_chunk()) {
            (Some(_), Some(length)) => u64::try_from(i64::from_le_bytes(*length)).unwrap_or(0),
            _ => bytes.len() as u64,
        });
    }
    let bytes_max = (body.len() as u64).saturating_mul(RATIO_MAX) + BYTES_MIN;
    if held > bytes_max {
        return Err(format!("it declares {held} bytes where {} are", body.len()));
    }
    Ok(())
}

const MAGIC: &[u8] = b"ARROW1";
/// Bytes after the footer: its length and the magic.
const TRAILER_BYTES: u64 = 10;
/// Bytes before the flatbuffer of a message.
const PREFIX_BYTES: u64 = 8;
/// Greatest ratio of decompressed to compressed bytes, beyond [`BYTES_MIN`].
const RATIO_MAX: u64 = 1024;
/// What any batch may need once it is decompressed.
const BYTES_MIN: u64 = 64 << 20;
/// Number of values that any batch may have: compressed, a few bytes are many equal values.
const LENGTH_MAX: i64 = 512 << 20;
const UNREADABLE: &str = "not a readable Arrow IPC file";
