# moesaic_embed_files(FOLDER OUTPUT)
#   writes a C++ file that holds the bytes of FOLDER's files (src/server/web_files.h), remade when one changes.
function(moesaic_embed_files folder output)
  file(GLOB_RECURSE files CONFIGURE_DEPENDS LIST_DIRECTORIES false ${folder}/*)
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DFOLDER=${folder} -DOUTPUT=${output} -P ${CMAKE_SOURCE_DIR}/cmake/embed_files.cmake
    DEPENDS ${files} ${CMAKE_SOURCE_DIR}/cmake/embed_files.cmake
    COMMENT "Embedding ${folder}")
endfunction()
