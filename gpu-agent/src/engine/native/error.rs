//! Why there is no engine.

use pinion_transfer::file::FileError;
use pinion_transfer::pool::PoolError;
use std::path::PathBuf;

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// No such file.
    #[error("there is no model at {}: `make model` fetches one, or say where yours is", .0.display())]
    Missing(PathBuf),
    /// It cannot be read.
    #[error("the model at {} cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// Another format, or a damaged file.
    #[error("the model is not a whole GGUF file ({0}): fetch it again")]
    NotGguf(&'static str),
    /// A model of another family.
    #[error("models of architecture `{0}` are not supported: choose a GGUF of architecture `llama`")]
    Architecture(String),
    /// A Llama with something that this engine does not compute.
    #[error("the model has {0}, which is not supported: choose another one")]
    Unsupported(&'static str),
    /// A number that the model needs is not in the file, or is impossible.
    #[error("the model's metadata `{0}` is missing or impossible: fetch the file again, or choose another one")]
    Metadata(String),
    /// A tensor is not in the file.
    #[error("the model has no tensor `{0}`: the file is not a complete Llama, choose another one")]
    NoTensor(String),
    /// A tensor has the wrong shape.
    #[error("tensor `{name}` is {found:?} and should be {wanted:?}: the file contradicts itself, fetch it again")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape, numbers per row first.
        found: Vec<u64>,
        /// What the metadata say.
        wanted: Vec<u64>,
    },
    /// A tensor is stored in a way this engine cannot read.
    #[error(
        "tensor `{name}` is of type {kind}, which is not supported: use Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q6_K or F16"
    )]
    Kind {
        /// The tensor.
        name: String,
        /// Its type's number in GGUF.
        kind: u32,
    },
    /// A tensor is longer than the file.
    #[error("tensor `{0}` is not whole: the file ends too early, fetch it again")]
    Short(String),
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No model.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// No page pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// No file tier.
    #[error(transparent)]
    File(#[from] FileError),
    /// No folder for it.
    #[error("no folder for the file tier at {}: {source}; choose another native.file_tier.folder", folder.display())]
    Folder {
        /// Where.
        folder: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// No thread to compute on.
    #[error("the system gives no thread to the engine: {0}")]
    Thread(String),
}
